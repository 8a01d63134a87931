"""Checkpoints reach the store and come back whole through a network and a store that fail in every known way."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from s3_faults import Fault, FaultyStore
from s3_server import BUCKET, found_by_boto3
from test_run_store import NEVER, begun, content, save
from waiting import wait_until

from megatron_fleet.checkpoint import store as module
from megatron_fleet.checkpoint.checkpoints import Checkpoint, Checkpoints
from megatron_fleet.checkpoint.resume_point import find_start
from megatron_fleet.checkpoint.store import RunStore, Uploader
from megatron_fleet.config.load import load
from megatron_fleet.storage.open import open_folder

MANIFEST = r"manifest\.json"
SHARD = r"__1_0\.distcp"
"""One file of the checkpoints."""


@pytest.fixture(scope="module")
def faulty(s3):
    store = FaultyStore(s3)
    yield store
    store.close()


@pytest.fixture
def url(faulty, monkeypatch, request, tmp_path):
    """Address of a store of this test alone, reached through `faulty`; requests are retried soon."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", faulty.endpoint)
    monkeypatch.setattr(module, "FIRST_RETRY_S", 0.01)
    yield f"s3://{BUCKET}/{tmp_path.name}"
    faulty.plan()


def uploaded(store: RunStore, *saved: Checkpoint) -> dict[str, float]:
    """Upload as a run does; its metrics."""
    uploader = Uploader(store, lambda steps: set(steps))
    for checkpoint in saved:
        uploader.add(checkpoint)
    uploader.close(120)
    return uploader.metrics()


def assert_there(url: str, saved: Checkpoint, folder: Path) -> None:
    """The newest checkpoint of the store is ``saved``, byte for byte."""
    store = RunStore(url)
    assert store.steps()[0] == saved.step
    store.download(saved.step, folder, NEVER)
    Checkpoint.open(folder).verify()
    assert content(Checkpoint.open(folder)) == content(saved)


UPLOADS = {
    "503 for a part": Fault("refuse", f"PUT .*{SHARD}.*partNumber", times=2),
    "503 for a part, with a time to wait": Fault("refuse", f"PUT .*{SHARD}.*partNumber", retry_after=1),
    "503 for the begin of an upload": Fault("refuse", f"POST .*{SHARD}.*uploads"),
    "503 for the list of files": Fault("refuse", r"GET .*list-type"),
    "reset in the middle of a part": Fault("cut", f"PUT .*{SHARD}.*partNumber"),
    "a flipped bit of a part": Fault("flip", f"PUT .*{SHARD}.*partNumber"),
    "500 after a part has arrived": Fault("lose", f"PUT .*{SHARD}.*partNumber", status=500),
    "500 after a file is complete": Fault("lose", f"POST .*{SHARD}.*uploadId", status=500),
    "500 after the manifest is there": Fault("lose", f"PUT .*{MANIFEST}", status=500),
    "reset in the middle of the manifest": Fault("cut", f"PUT .*{MANIFEST}"),
    "a flipped bit of the manifest": Fault("flip", f"PUT .*{MANIFEST}"),
    "409 for the manifest": Fault("refuse", f"PUT .*{MANIFEST}", status=409),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", UPLOADS.values(), ids=UPLOADS.keys())
def test_uploads_arrive(faulty, url, tmp_path, fault):
    saved, store = save(tmp_path / "here", 7), begun(url)
    faulty.plan(fault)
    metrics = uploaded(store, saved)
    assert faulty.left() == 0
    assert (metrics["checkpoint/uploads"], metrics["checkpoint/uploads_failed"]) == (1, 0)
    assert_there(url, saved, tmp_path / "back")


@pytest.mark.slow
def test_a_file_that_is_complete_though_the_store_forgot_its_upload(faulty, url, tmp_path):
    """The answer was lost, and the store does not know the upload any more when it is asked again."""
    saved, store = save(tmp_path / "here", 7), begun(url)
    complete = f"POST .*{SHARD}.*uploadId"
    faulty.plan(Fault("lose", complete, status=500), Fault("refuse", complete, status=404))
    assert uploaded(store, saved)["checkpoint/uploads"] == 1
    assert faulty.left() == 0
    assert len([r for r in faulty.requests if re.search(f"PUT .*{SHARD}.*partNumber", r)]) == 1
    assert_there(url, saved, tmp_path / "back")


@pytest.mark.slow
def test_a_manifest_that_does_not_arrive_leaves_a_torn_upload_that_is_finished_later(
    faulty, url, tmp_path, monkeypatch
):
    """Nobody goes on from it, and nothing is sent twice."""
    first, saved, store = save(tmp_path / "here", 6), save(tmp_path / "here", 7), begun(url)
    uploaded(store, first)
    monkeypatch.setattr(module, "FIRST_RETRY_S", 3600.0)
    faulty.plan(Fault("refuse", f"PUT .*_7/{MANIFEST}", status=403))
    uploader = Uploader(store, set)
    uploader.add(saved)
    wait_until(lambda: uploader.metrics()["checkpoint/uploads_failed"])
    uploader.close(0)
    assert RunStore(url).steps() == [6]
    assert_there(url, first, tmp_path / "back")
    faulty.plan()
    uploaded(begun(url), saved)
    assert not [request for request in faulty.requests if "distcp" in request and request.startswith(("PUT", "POST"))]
    assert_there(url, saved, tmp_path / "back")
    assert module.UPLOADING not in open_folder(f"{url}/global_step_7").sizes()


DOWNLOADS = {
    "503": Fault("refuse", f"GET .*{SHARD}", times=2),
    "503, with a time to wait": Fault("refuse", f"GET .*{SHARD}", retry_after=1),
    "reset in the middle": Fault("cut", f"GET .*{SHARD}"),
    "a flipped bit": Fault("flip", f"GET .*{SHARD}"),
    "503 for the manifest": Fault("refuse", f"GET .*{MANIFEST}"),
    "a flipped bit of the manifest": Fault("flip", f"GET .*{MANIFEST}"),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", DOWNLOADS.values(), ids=DOWNLOADS.keys())
def test_downloads_arrive(faulty, url, tmp_path, fault):
    saved, store = save(tmp_path / "here", 7), begun(url)
    store.upload(saved, NEVER)
    faulty.plan(fault)
    assert_there(url, saved, tmp_path / "back")
    assert faulty.left() == 0


@pytest.mark.slow
def test_bytes_that_arrive_damaged_each_time_are_passed_over(faulty, url, tmp_path, caplog):
    """The run goes on from the checkpoint before, and says so."""
    store, older, newer = begun(url), save(tmp_path / "here", 6), save(tmp_path / "here", 7)
    for saved in (older, newer):
        store.upload(saved, NEVER)
    faulty.plan(Fault("flip", f"GET .*_7/{SHARD}", times=99))
    out = tmp_path / "elsewhere"
    config = load(["experiment=quickstart", f"run.out={out}"])
    found = find_start(config, Checkpoints(out / "checkpoints", 2), RunStore(url))
    assert found is not None and found.step == 6
    found.verify()
    assert content(found) == content(older)
    assert "__1_0.distcp is damaged" in caplog.text and "skipping a damaged checkpoint" in caplog.text
    assert len([r for r in faulty.requests if re.search(f"GET .*_7/{SHARD}", r)]) == 2
    assert len([r for r in faulty.requests if "GET" in r and "_7/__0_0" in r]) == 1  # what is whole stays


def test_an_attempt_that_another_one_overtakes_takes_the_next_number(faulty, url):
    """Its conditional write loses: the other's object appears between its look and its write."""
    number = "attempts/000001.json"
    faulty.plan(Fault("first", f"PUT .*{number}", act=lambda: open_folder(url).write(number, b"the other one")))
    assert begun(url).attempt == 2
    assert open_folder(url).read(number) == b"the other one"


@pytest.mark.parametrize("status", [409, 500], ids=["conflict", "answer lost"])
def test_an_attempt_has_one_number_though_it_is_written_twice(faulty, url, status):
    number = "attempts/000001.json"
    faulty.plan(Fault("lose" if status == 500 else "refuse", f"PUT .*{number}", status=status))
    assert begun(url).attempt == 1
    assert faulty.left() == 0 and list(open_folder(url).sizes()) == [number]


@pytest.mark.slow
def test_a_slow_line_carries_everything(s3, monkeypatch, tmp_path):
    slow = FaultyStore(s3, bytes_per_s=200e3)
    monkeypatch.setenv("AWS_ENDPOINT_URL", slow.endpoint)
    url, saved = f"s3://{BUCKET}/{tmp_path.name}", save(tmp_path / "here", 7)
    assert uploaded(begun(url), saved)["checkpoint/uploads_failed"] == 0
    assert_there(url, saved, tmp_path / "back")
    slow.close()


@pytest.mark.slow
def test_a_store_that_dies_in_the_middle_and_comes_back(tmp_path, monkeypatch):
    """The newest whole checkpoint before, the new one after; none of it is sent twice by the run that goes on."""
    monkeypatch.setattr(module, "FIRST_RETRY_S", 0.01)
    first, saved = save(tmp_path / "here", 6), save(tmp_path / "here", 7)
    url = f"s3://{BUCKET}/{tmp_path.name}"
    with found_by_boto3() as server:
        faulty = FaultyStore(server)
        monkeypatch.setenv("AWS_ENDPOINT_URL", faulty.endpoint)
        store = begun(url)
        uploaded(store, first)
        faulty.plan(Fault("first", r"POST .*__1_0.distcp.*uploadId", act=server.kill))
        uploader = Uploader(store, lambda steps: set(steps))
        uploader.add(saved)
        wait_until(lambda: faulty.left() == 0)
        server.start()
        assert RunStore(url).steps()[-1] == 6
        uploader.close(120)
        assert_there(url, saved, tmp_path / "back")
        RunStore(url).download(6, tmp_path / "before", NEVER)
        assert content(Checkpoint.open(tmp_path / "before")) == content(first)
        faulty.close()

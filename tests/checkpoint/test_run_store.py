"""Copies of checkpoints in a store: whole or not there, one writer at a time, damage found."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import threading
from concurrent.futures import CancelledError
from pathlib import Path

import pytest
from s3_server import BUCKET, Wire

from megatron_fleet.checkpoint import store as module
from megatron_fleet.checkpoint.checkpoints import Checkpoint, Checkpoints, kept_besides
from megatron_fleet.checkpoint.manifest import DamagedCheckpoint
from megatron_fleet.checkpoint.store import Replaced, RunStore, Uploader, run_url
from megatron_fleet.config.errors import UserError
from megatron_fleet.storage.folder import Files
from megatron_fleet.storage.local import LocalFolder, fingerprint, list_files
from megatron_fleet.storage.open import open_folder

NEVER = threading.Event()


def save(folder: Path, step: int, size: int = 300_000) -> Checkpoint:
    """A committed checkpoint of other bytes each time."""

    async def write(path: Path) -> Files:
        for rank in range(3):
            (path / f"__{rank}_0.distcp").write_bytes(os.urandom(size))
        (path / ".metadata").write_bytes(os.urandom(100))
        return {file.name: fingerprint(file) for file in list_files(path)}

    saved = asyncio.run(Checkpoints(folder, keep=99).save(step, write, {"step": step}))
    assert saved is not None
    return saved


def content(checkpoint: Checkpoint) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in list_files(checkpoint.path)}


def begun(url: str) -> RunStore:
    store = RunStore(url)
    store.begin_attempt()
    return store


def test_there_and_back(any_url, tmp_path):
    store, saved = begun(any_url), save(tmp_path / "here", 7)
    assert store.steps() == []
    store.upload(saved, NEVER)
    store.upload(saved, NEVER)  # is there already
    assert store.steps() == [7]
    RunStore(any_url).download(7, tmp_path / "there" / "step_000007", NEVER)
    back = Checkpoint.open(tmp_path / "there" / "step_000007")
    back.verify()
    assert content(back) == content(saved)
    assert "uploading.json" not in open_folder(f"{any_url}/global_step_7").sizes()


def test_an_interrupted_upload_is_no_checkpoint_and_is_gone_on_with(any_url, tmp_path, monkeypatch):
    store, saved = begun(any_url), save(tmp_path / "here", 7)
    sent, copied, stop = [], module.transfer, threading.Event()

    def some(source, target, copies, throttle, stop):
        sent.append([copy.source for copy in copies])
        copied(source, target, copies[: len(copies) // 2 if len(sent) == 1 else None], throttle, stop)
        if len(sent) == 1:
            raise CancelledError

    monkeypatch.setattr(module, "transfer", some)
    with pytest.raises(CancelledError):
        store.upload(saved, stop)
    assert store.steps() == []
    store.upload(saved, stop)
    assert store.steps() == [7]
    assert len(sent[0]) == 5 and sent[1] == sent[0][2:]


def test_what_is_left_of_another_checkpoint_of_the_step_is_not_used(any_url, tmp_path, monkeypatch):
    """Sizes are equal, bytes are not: the run was resumed from an earlier step."""
    store, first = begun(any_url), save(tmp_path / "first", 7)
    with monkeypatch.context() as patch, pytest.raises(UserError, match="the store holds"):
        copied = module.transfer
        patch.setattr(module, "transfer", lambda s, t, copies, *rest: copied(s, t, copies[:-1], *rest))
        store.upload(first, NEVER)
    second = save(tmp_path / "second", 7)
    store.upload(second, NEVER)
    store.download(7, tmp_path / "back", NEVER)
    assert content(Checkpoint.open(tmp_path / "back")) == content(second)
    third = save(tmp_path / "third", 7)
    store.upload(third, NEVER)  # in place of a whole one
    store.download(7, tmp_path / "back", NEVER)
    assert content(Checkpoint.open(tmp_path / "back")) == content(third)


@pytest.mark.parametrize("damage", ["flipped", "shorter", "missing", "no JSON"])
def test_damage_is_found_and_nothing_takes_the_place(any_url, tmp_path, damage):
    store = begun(any_url)
    store.upload(save(tmp_path / "here", 7), NEVER)
    folder = open_folder(f"{any_url}/global_step_7")
    name = "manifest.json" if damage == "no JSON" else "__1_0.distcp"
    data = bytearray(folder.read(name))
    data[100] ^= 1
    if damage == "missing":
        folder.delete(name)
    else:
        folder.write(name, {"flipped": bytes(data), "shorter": bytes(data[:-1]), "no JSON": b"{"}[damage])
    (tmp_path / "back").mkdir()
    (tmp_path / "back" / "before").touch()
    with pytest.raises(DamagedCheckpoint):
        store.download(7, tmp_path / "back", NEVER)
    assert [path.name for path in (tmp_path / "back").iterdir()] == ["before"]


def test_a_disk_without_room_is_seen_before_a_download(any_url, tmp_path, monkeypatch):
    store = begun(any_url)
    store.upload(save(tmp_path / "here", 7), NEVER)
    usage = shutil.disk_usage(tmp_path)._replace(free=900_000)  # of 900,100 and the small ones
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    monkeypatch.setattr(module, "transfer", lambda *_, **__: pytest.fail("something was copied"))
    with pytest.raises(UserError, match=r"the disk has [\d.]+ \wB left, and .*global_step_7 takes [\d.]+ \wB; make"):
        store.download(7, tmp_path / "back", NEVER)
    assert not (tmp_path / "back").exists()


def test_a_later_attempt_stops_the_earlier_one(any_url, tmp_path):
    first, saved = begun(any_url), save(tmp_path / "here", 7)
    second = begun(any_url)
    assert (first.attempt, second.attempt) == (1, 2)
    with pytest.raises(Replaced, match="attempt 2 at this run has begun since this one, attempt 1"):
        first.upload(saved, NEVER)
    second.upload(saved, NEVER)
    uploader = Uploader(first, set)
    uploader.add(saved)
    uploader.close(60)
    with pytest.raises(Replaced):
        uploader.check()


def test_of_attempts_that_begin_at_once_each_has_its_number(any_url):
    stores = [RunStore(any_url) for _ in range(8)]
    threads = [threading.Thread(target=store.begin_attempt) for store in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(store.attempt for store in stores) == list(range(1, 9))


def test_superseded_checkpoints_do_not_count(any_url, tmp_path):
    store = begun(any_url)
    for step in (2, 4, 6):
        store.upload(save(tmp_path / "here", step), NEVER)
    store.set_later_aside(2)
    assert store.steps() == [2]
    again = save(tmp_path / "again", 4)
    store.upload(again, NEVER)
    assert store.steps() == [4, 2]
    store.download(4, tmp_path / "back", NEVER)
    assert content(Checkpoint.open(tmp_path / "back")) == content(again)


def test_the_store_keeps_what_it_is_to_keep(any_url, tmp_path):
    store = begun(any_url)
    uploader = Uploader(store, lambda steps: set(steps[:2]) | {4})
    for step in range(1, 8):
        uploader.add(save(tmp_path / "here", step, size=10))
    uploader.close(120)
    assert store.steps() == [7, 6, 4]
    assert uploader.waiting() == set() and uploader.metrics()["checkpoint/uploads"] == 7
    names = open_folder(any_url).sizes()
    assert {name.partition("/")[0] for name in names} == {"attempts", *(f"global_step_{n}" for n in (4, 6, 7))}


def test_a_store_that_fails_is_tried_again(tmp_path, monkeypatch, caplog):
    store, saved = begun(str(tmp_path / "store")), save(tmp_path / "here", 7)
    monkeypatch.setattr(module, "FIRST_RETRY_S", 0.01)
    failures, upload = [UserError("503"), OSError("no route")], store.upload

    def sometimes(*arguments):
        if failures:
            raise failures.pop()
        upload(*arguments)

    monkeypatch.setattr(store, "upload", sometimes)
    uploader = Uploader(store, set(store.steps()).union)
    uploader.add(saved)
    uploader.close(60)
    assert store.steps() == [7] and uploader.metrics()["checkpoint/uploads_failed"] == 2
    assert "step 7 could not be uploaded yet: 503" in caplog.text


def test_closing_gives_up_in_time_and_says_what_is_left(tmp_path, monkeypatch, caplog):
    store, saved = begun(str(tmp_path / "store")), save(tmp_path / "here", 7)

    def refuse(*_):
        raise UserError("403")

    monkeypatch.setattr(store, "upload", refuse)
    uploader = Uploader(store, set)
    uploader.add(saved)
    assert uploader.waiting() == {7}
    uploader.close(0.1)
    assert "step 7 was not uploaded to" in caplog.text


KILLED = """
import sys, threading
from pathlib import Path
from megatron_fleet.checkpoint.checkpoints import Checkpoint
from megatron_fleet.checkpoint.store import RunStore
store = RunStore(sys.argv[1], bytes_per_s=float(sys.argv[3]))
store.begin_attempt()
print("begun", flush=True)
store.upload(Checkpoint.open(Path(sys.argv[2])), threading.Event())
"""


@pytest.mark.slow
def test_killed_while_it_uploads(any_url, tmp_path):
    saved = save(tmp_path / "here", 7, size=20 << 20)
    for _ in range(3):
        command = [sys.executable, "-c", KILLED, any_url, str(saved.path), str(30e6)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None and process.stdout.readline() == "begun\n"
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.7)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert RunStore(any_url).steps() == []
    store = begun(any_url)
    store.upload(saved, NEVER)
    store.download(7, tmp_path / "back", NEVER)
    assert content(Checkpoint.open(tmp_path / "back")) == content(saved)


@pytest.mark.slow
def test_connections_that_break_on_both_ways(s3, tmp_path, monkeypatch):
    saved = save(tmp_path / "here", 7, size=2 << 20)
    wire = Wire(s3, cuts=3, after=1 << 18)
    with monkeypatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", wire.endpoint)
        store = begun(f"s3://{BUCKET}/broken")
        store.upload(saved, NEVER)
        store.download(7, tmp_path / "back", NEVER)
        wire.close()
    assert wire.cuts_left == 0
    assert content(Checkpoint.open(tmp_path / "back")) == content(saved)


def test_an_unfinished_file_of_a_folder_store_is_not_listed(tmp_path):
    assert LocalFolder(tmp_path).write_new("a/b", b"1")
    assert not LocalFolder(tmp_path).write_new("a/b", b"2")
    assert LocalFolder(tmp_path).read("a/b") == b"1" and LocalFolder(tmp_path).sizes() == {"a/b": 1}


def test_the_address_of_a_run():
    assert run_url("s3://b/p/", "proj", "/models/Qwen3-8B/", "fleet_1") == "s3://b/p/proj/Qwen3-8B/fleet_1"
    assert run_url("/disk", "proj", "Qwen/Qwen3-8B", "fleet_1") == "/disk/proj/Qwen3-8B/fleet_1"


def test_kept_besides_the_newest():
    steps = [50, 40, 30, 20, 10]
    assert kept_besides(steps, 0, {}) == set()
    assert kept_besides(steps, 20, {}) == {40, 20}
    assert kept_besides(steps, 0, {10: 0.5, 30: 0.7, 40: 0.7, 45: 0.9}) == {40}

"""A staged folder is there whole or not at all, whoever is killed and whenever."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from megatron_fleet.config.errors import UserError
from megatron_fleet.storage import staging as staging_module
from megatron_fleet.storage.folder import aligned_buffer
from megatron_fleet.storage.open import open_folder, open_staging

MARKER = "index.json"


@pytest.fixture(params=["local", "s3", "gcs"])
def url(request, tmp_path):
    return (
        str(tmp_path / "deep" / "out") if request.param == "local" else request.getfixturevalue(f"{request.param}_url")
    )


def visible(url: str) -> dict[str, int]:
    """Files that a reader who looks for the marker sees."""
    sizes = open_folder(url).sizes()
    return sizes if MARKER in sizes else {}


def test_the_folder_appears_with_its_marker(url):
    staging = open_staging(url, MARKER)
    staging.folder.write("a", b"12")
    writer = staging.folder.create("sub/b", 5000)
    writer.write_at(0, aligned_buffer(5000))
    writer.commit()
    assert not staging.exists()
    assert visible(url) == {}
    assert open_staging(url, MARKER).folder.sizes() == {"a": 2, "sub/b": 5000}
    staging.commit(b"{}")
    assert visible(url) == {"a": 2, MARKER: 2, "sub/b": 5000}
    assert staging.exists()
    assert open_staging(url, MARKER).exists()


def test_processes_that_commit_the_same_at_once_all_succeed(url):
    for round_ in range(20 if "://" not in url else 1):
        address = f"{url}/{round_}"
        stagings = [open_staging(address, MARKER) for _ in range(4)]
        stagings[0].folder.write("a", b"12")
        barrier = Barrier(len(stagings))

        def commit(staging, barrier=barrier):
            barrier.wait()
            staging.commit(b"{}")

        with ThreadPoolExecutor(len(stagings)) as pool:
            list(pool.map(commit, stagings))
        assert visible(address) == {"a": 2, MARKER: 2}
        stagings[0].commit(b"{}")
        if "://" not in url:
            assert sorted(os.listdir(address)) == ["a", MARKER]
    if "://" not in url:
        assert sorted(os.listdir(url)) == sorted(str(i) for i in range(20))


def test_what_is_there_already_stays(url):
    open_folder(url).write(MARKER, b"other")
    staging = open_staging(url, MARKER)
    assert staging.exists()
    with pytest.raises(UserError, match="something else is at this path"):
        staging.commit(b"{}")
    assert open_folder(url).read(MARKER) == b"other"
    assert open_folder(url).sizes() == {MARKER: 5}


def test_a_foreign_folder_or_file_is_refused_before_the_work(tmp_path):
    for path in (tmp_path / "folder" / "file", tmp_path / "file"):
        open_folder(path.parent).write(path.name, b"precious")
        staging = open_staging(tmp_path / path.relative_to(tmp_path).parts[0], MARKER)
        with pytest.raises(UserError, match="something else is at this path"):
            staging.exists()
        staging.folder.write("a", b"12")
        with pytest.raises(UserError, match="something else is at this path"):
            staging.commit(b"{}")
        assert path.read_bytes() == b"precious"
    (tmp_path / "empty").mkdir()
    staging = open_staging(tmp_path / "empty", MARKER)
    assert not staging.exists()
    staging.folder.write("a", b"12")
    staging.commit(b"{}")
    assert visible(str(tmp_path / "empty")) == {"a": 2, MARKER: 2}


def test_committing_nothing_is_refused(tmp_path):
    with pytest.raises(UserError, match="out was removed or renamed while being written"):
        open_staging(tmp_path / "out", MARKER).commit(b"{}")
    assert os.listdir(tmp_path) == []


FILL = """
import os, sys
from pathlib import Path
from megatron_fleet.storage import staging as module
from megatron_fleet.storage.folder import aligned_buffer
from megatron_fleet.storage import staging as staging_module
from megatron_fleet.storage.open import open_staging
url, moment = sys.argv[1:]
staging = open_staging(url, "index.json")
staging.folder.write("a", b"12")
writer = staging.folder.create("big", 30_000_000)
writer.write_at(0, aligned_buffer(writer.part))
if moment == "writing":
    print("ready", flush=True)
    sys.stdin.read()
die = lambda *a: os.kill(os.getpid(), 9)
if moment == "before the marker":
    module.write_atomically = die
if moment == "within the marker":
    os.replace = die
if moment == "before the rename":
    Path.rename = die
if moment == "after the rename":
    module.sync_folder = die
staging.commit(b"{}")
"""


def killed(url: str, moment: str) -> None:
    command = [sys.executable, "-c", FILL, url, moment]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        if moment == "writing":
            assert process.stdout.readline() == "ready\n"
            process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL


@pytest.mark.parametrize(
    "moment", ["writing", "before the marker", "within the marker", "before the rename", "after the rename"]
)
def test_after_a_kill_at_any_moment_the_work_goes_on(tmp_path, moment):
    url = str(tmp_path / "out")
    killed(url, moment)
    staging = open_staging(url, MARKER)
    committed = moment == "after the rename"
    assert staging.exists() == committed
    if not committed:
        assert visible(url) == {}
        assert staging.folder.sizes()["a"] == 2
        staging.commit(b"{}")
    assert visible(url) == {"a": 2, MARKER: 2}
    assert sorted(os.listdir(tmp_path)) == ["out"]
    assert sorted(p.name for p in Path(url).rglob("*")) == ["a", MARKER]


def test_after_a_kill_the_unfinished_upload_is_invisible_and_goes_with_publishing(s3, s3_url):
    killed(s3_url, "writing")
    staging = open_staging(s3_url, MARKER)
    client = staging.folder._client
    bucket, _, prefix = s3_url.removeprefix("s3://").partition("/")

    def uploads() -> int:
        return len(client.list_multipart_uploads(Bucket=bucket, Prefix=f"{prefix}/").get("Uploads", []))

    assert not staging.exists()
    assert staging.folder.sizes() == {"a": 2}
    assert uploads() == 1
    staging.commit(b"{}")
    assert uploads() == 0
    assert visible(s3_url) == {"a": 2, MARKER: 2}


def test_a_store_that_does_not_list_uploads_is_committed_to_all_the_same(store_url, monkeypatch, caplog):
    staging = open_staging(store_url, MARKER)

    def denied():
        raise UserError("the store denies the access (AccessDenied)")

    monkeypatch.setattr(staging.folder, "abort_uploads", denied)
    staging.commit(b"{}")
    assert staging.exists()
    assert "uploads, if any, stay in the store: the store denies the access" in caplog.text


def test_what_another_process_began_meanwhile_does_not_stay(tmp_path, monkeypatch):
    staging = open_staging(tmp_path / "out", "marker")
    staging.folder.write("a", b"x")
    write = staging_module.write_atomically

    def late(path, data, beside):
        (path.parent / ".b.1234.partial").write_bytes(b"begun by another")
        write(path, data, beside)

    monkeypatch.setattr(staging_module, "write_atomically", late)
    staging.commit(b"done")
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["a", "marker"]


@pytest.mark.parametrize("look", range(4))
def test_a_folder_that_another_process_commits_during_any_look_is_the_finished_one(tmp_path, monkeypatch, look):
    """Whatever the check looks at before the rename, it finds either nothing or the marker, nothing foreign."""
    here, there = (open_staging(str(tmp_path / "out"), "done") for _ in range(2))
    there.folder.write("a.bin", b"a")
    looks = 0

    def renamed_before(method):
        def looked(path, *arguments):
            nonlocal looks
            looks += 1
            if looks == look + 1:
                there.commit(b"whole")
            return method(path, *arguments)

        return looked

    with monkeypatch.context() as patch:
        for name in ("exists", "is_dir", "is_file", "iterdir"):
            patch.setattr(Path, name, renamed_before(getattr(Path, name)))
        here.exists()
    assert here.exists() or looks <= look

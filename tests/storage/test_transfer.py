"""Files copied between folders, local and in stores."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import CancelledError

import pytest
from s3_server import BUCKET, Wire

from megatron_fleet.config.errors import UserError
from megatron_fleet.storage import folder as folders
from megatron_fleet.storage.local import LocalFolder
from megatron_fleet.storage.open import open_folder
from megatron_fleet.storage.transfer import Copy, Throttle, transfer

MB = 1 << 20


@pytest.fixture
def files(tmp_path):
    """Files of all kinds of sizes."""
    sizes = {"empty": 0, "one": 1, "sub/odd": MB + 3, "sub/parts": folders.PART + MB}
    source = LocalFolder(tmp_path / "source")
    for name, size in sizes.items():
        source.write(name, os.urandom(size))
    return source, [Copy(name, f"to/{name}", size) for name, size in sizes.items()]


@pytest.fixture(params=["disk", "s3", "gcs"])
def any_url(request, tmp_path):
    return str(tmp_path / "store") if request.param == "disk" else request.getfixturevalue(f"{request.param}_url")


def assert_equal(source, target, copies):
    assert target.sizes() == {copy.target: copy.size for copy in sorted(copies, key=lambda copy: copy.target)}
    for copy in copies:
        assert target.read(copy.target) == source.read(copy.source)


def test_there_and_back(files, tmp_path, any_url):
    source, copies = files
    store, done = open_folder(any_url), []
    transfer(source, store, copies, advance=done.append)
    assert_equal(source, store, copies)
    assert sum(done) == sum(copy.size for copy in copies)
    back = LocalFolder(tmp_path / "back")
    transfer(store, back, [Copy(c.target, c.source, c.size) for c in copies])
    assert {name: back.read(name) for name in back.sizes()} == {c.source: source.read(c.source) for c in copies}


def test_a_file_that_is_too_short_fails_and_appears_nowhere(files, tmp_path):
    source, copies = files
    target = LocalFolder(tmp_path / "target")
    with pytest.raises(UserError, match="parts"):
        transfer(source, target, [Copy(c.source, c.target, c.size + (c.source == "sub/parts")) for c in copies])
    assert "to/sub/parts" not in target.sizes()
    assert [path for path in (tmp_path / "target").rglob("*") if path.name.endswith(".partial")] == []


def test_stopped_in_the_middle(files, tmp_path):
    source, copies = files
    stop = threading.Event()
    with pytest.raises(CancelledError):
        transfer(source, LocalFolder(tmp_path / "target"), copies, stop=stop, advance=lambda count: stop.set())
    transfer(source, LocalFolder(tmp_path / "target"), copies)
    assert_equal(source, LocalFolder(tmp_path / "target"), copies)


def test_a_stop_ends_the_wait_of_a_throttle(files, tmp_path):
    source, copies = files
    stop = threading.Event()
    threading.Timer(0.2, stop.set).start()
    with pytest.raises(CancelledError):
        transfer(source, LocalFolder(tmp_path / "target"), copies, Throttle(1.0), stop)  # years for all of it


def test_a_throttle_is_kept_to(monkeypatch):
    now, stop = 100.0, threading.Event()
    waits = []
    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(stop, "wait", waits.append)
    throttle = Throttle(10.0)
    for _ in range(3):
        throttle.wait(20, stop)
    assert waits == [0.0, 2.0, 4.0]


def test_broken_connections_are_made_again(files, s3, monkeypatch, tmp_path):
    source, copies = files
    transfer(source, open_folder(f"s3://{BUCKET}/broken"), copies)
    wire = Wire(s3, cuts=2, after=MB // 2)
    try:
        monkeypatch.setenv("AWS_ENDPOINT_URL", wire.endpoint)
        target = LocalFolder(tmp_path / "target")
        transfer(open_folder(f"s3://{BUCKET}/broken"), target, [Copy(c.target, c.target, c.size) for c in copies])
        assert wire.cuts_left == 0
    finally:
        wire.close()
    assert_equal(source, target, copies)

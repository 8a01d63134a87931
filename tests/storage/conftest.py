"""The servers of the storage tests, and local folders on file systems of all kinds."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from gcs_server import GCS_BUCKET, gcs_server
from s3_server import BUCKET, s3_server

from megatron_fleet.storage import direct, local
from megatron_fleet.storage.open import open_folder


@pytest.fixture(scope="module")
def s3_running():
    """A real S3 server."""
    with s3_server() as server:
        yield server


@pytest.fixture
def s3(s3_running, monkeypatch):
    """The server, found by boto3's own chain."""
    for name, value in s3_running.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    return s3_running


@pytest.fixture
def s3_url(s3, request):
    """An S3 address that no other test uses."""
    return f"s3://{BUCKET}/{request.node.name.replace('[', '-').replace(']', '')}"


@pytest.fixture(scope="session")
def gcs_running():
    """A GCS server for the whole session."""
    pytest.importorskip("google.cloud.storage")
    with gcs_server() as server:
        yield server


@pytest.fixture
def gcs(gcs_running, monkeypatch):
    """The server, found by Google's client."""
    for name, value in gcs_running.environment().items():
        monkeypatch.setenv(name, value)
    return gcs_running


@pytest.fixture
def gcs_url(gcs, request):
    """A GCS address that no other test uses."""
    return f"gs://{GCS_BUCKET}/{request.node.name.replace('[', '-').replace(']', '')}"


@pytest.fixture(params=["s3", "gcs"])
def store_url(request):
    """An address in a store of each kind that no other test uses."""
    return request.getfixturevalue(f"{request.param}_url")


@pytest.fixture(params=["disk", "memory", "refusing disk"])
def local_folder(request, tmp_path, monkeypatch):
    """A folder on a disk, one on tmpfs, and one on a disk that refuses direct transfers, as old tmpfs does."""
    if request.param == "memory":
        if not os.access("/dev/shm", os.W_OK):
            pytest.skip("needs a writable /dev/shm")
        with tempfile.TemporaryDirectory(dir="/dev/shm") as path:
            yield open_folder(path)
        return
    if request.param == "refusing disk":
        for module in (direct, local):
            monkeypatch.setattr(module, "set_direct", lambda fd, on: not on)
    yield open_folder(tmp_path)


@pytest.fixture
def small_steps(monkeypatch):
    """Sizes at which small files take every way."""
    monkeypatch.setattr(direct, "DIRECT_BYTES", 1000)
    monkeypatch.setattr(direct, "SCRATCH", 32 << 10)
    monkeypatch.setattr(direct, "PLACED", 64 << 10)
    monkeypatch.setattr(local, "PART", 16 << 10)

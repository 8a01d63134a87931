"""Objects on a GCS server: what Google Cloud Storage alone does. ``test_store_folders.py`` has what all stores do."""

from __future__ import annotations

import random

import pytest
from held_ports import held_ports
from s3_faults import Fault, FaultyStore
from storage_helpers import fill

from megatron_fleet.config.errors import UserError
from megatron_fleet.storage import remote
from megatron_fleet.storage.open import open_folder, open_staging


@pytest.fixture
def module(gcs, monkeypatch):
    """The module, with tiny parts and no waits."""
    from megatron_fleet.storage import gcs

    monkeypatch.setattr(gcs, "PART", 4096)
    monkeypatch.setattr(remote.time, "sleep", lambda seconds: None)
    return gcs


@pytest.fixture
def folder(module, gcs_url):
    return open_folder(gcs_url)


@pytest.fixture
def faulty(gcs, monkeypatch):
    """A network that fails, between the server and the folders that are opened hereafter."""
    store = FaultyStore(gcs)
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", store.endpoint)
    yield store
    store.close()


@pytest.mark.parametrize("parts", [3, 4, 5, 9, 10, 28])
def test_parts_are_joined_in_order_on_as_many_levels_as_needed(module, folder, monkeypatch, parts):
    monkeypatch.setattr(module, "SOURCES", 3)
    data = random.Random(parts).randbytes(4096 * (parts - 1) + 7)
    writer = folder.create("sub/file", len(data))
    fill(writer, data, threads=4)
    writer.commit()
    assert folder.read("sub/file") == data
    assert list(folder._listed("")) == ["sub/file"]


def test_nothing_stays_of_an_aborted_file(folder):
    writer = folder.create("file", 10_000)
    writer.write_at(4096, memoryview(bytes(4096)))
    assert folder.sizes() == {}
    assert len(folder._listed("")) == 2
    writer.abort()
    writer.abort()
    assert folder._listed("") == {}


def test_parts_of_killed_writers_go_when_the_folder_is_committed(module, gcs_url):
    staging = open_staging(gcs_url, "marker")
    staging.folder.create("sub/file", 10_000).write_at(0, memoryview(bytes(4096)))
    staging.commit(b"{}")
    assert list(staging.folder._listed("")) == ["marker"]


def test_a_part_that_another_process_removed_is_told(module, gcs_url, faulty):
    folder = open_folder(gcs_url)
    writer = folder.create("file", 5)
    fill(writer, b"12345")
    faulty.plan(Fault("refuse", "POST .*/compose", status=404))
    with pytest.raises(UserError, match="file: the unfinished upload was removed"):
        writer.commit()
    writer.abort()
    assert folder._listed("") == {}


def test_bytes_that_are_damaged_each_time_do_not_stay(folder, gcs_url, faulty):
    through = open_folder(gcs_url)
    faulty.plan(Fault("flip", "POST .*uploadType", times=100))
    with pytest.raises(UserError, match=r"store refuses the request .HTTP 4|bytes were damaged in every transfer"):
        through.write("file", b"12345" * 1000)
    assert folder.sizes() == {}


@pytest.mark.parametrize(
    ("status", "meaning"),
    [(401, "no credentials for the store"), (403, "the store denies the access .HTTP 403.; give this identity")],
    ids=["401", "403"],
)
def test_refusals_are_told(module, gcs_url, faulty, status, meaning):
    through = open_folder(gcs_url)
    faulty.plan(Fault("refuse", ".", times=100, status=status))
    calls = (
        through.sizes,
        lambda: through.read("x", 0, 1),
        lambda: through.write("x", b"1"),
        lambda: through.create("x", 1),
        lambda: through.delete("x"),
    )
    for call in calls:
        with pytest.raises(UserError, match=f"^gs://[^ ]*: {meaning}") as told:
            call()
        assert "http://" not in str(told.value)


def test_a_store_that_is_not_there_is_told(module, monkeypatch):
    with held_ports(1) as (port,):
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{port}")
        with pytest.raises(UserError, match=r"^gs://bucket/x: the store does not answer .*; check STORAGE_EMULATOR"):
            open_folder("gs://bucket/x").sizes()


def test_missing_credentials_are_told(module, monkeypatch, tmp_path):
    monkeypatch.delenv("STORAGE_EMULATOR_HOST")
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "none.json"))
    with pytest.raises(UserError, match="no credentials for the store; run `gcloud auth application-default login`"):
        open_folder("gs://bucket/x")

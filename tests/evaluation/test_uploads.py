"""A copy that fails half-way leaves nothing in the store."""

import os

import pytest

from megatron_fleet.evaluation.uploads import copy
from megatron_fleet.storage.local import LocalFolder


def test_a_file_that_cannot_be_read_leaves_nothing(tmp_path):
    store = LocalFolder(tmp_path / "store")
    (tmp_path / "good").write_bytes(os.urandom(5000))
    copy(tmp_path / "good", store, "evals/good")
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError):
        copy(tmp_path / "folder", store, "evals/bad")
    assert [path.name for path in (tmp_path / "store").rglob("*") if path.is_file()] == ["good"]
    assert store.read("evals/good") == (tmp_path / "good").read_bytes()

"""A copy that fails half-way leaves nothing in the store."""

import os
import re

import pytest

from megatron_fleet.evaluation.uploads import copy, unique_name
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


def test_runs_of_one_name_have_paths_of_their_own_which_they_keep(tmp_path):
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
    first, second = (unique_name("mine", tmp_path / folder) for folder in ("one", "two"))
    assert re.fullmatch("mine_[0-9a-f]{8}", first) and first != second
    assert unique_name("mine", tmp_path / "one") == first

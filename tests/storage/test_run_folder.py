"""A run's folder has one id for ever, and one process at a time."""

from __future__ import annotations

import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from megatron_fleet.config.errors import UserError
from megatron_fleet.storage.run_folder import ID, RunFolder, new_id

USE = """
import sys
from pathlib import Path
from megatron_fleet.storage.run_folder import RunFolder
folder = RunFolder(Path(sys.argv[1]), "mine")
print(folder.id, flush=True)
input()
"""


def test_runs_of_one_name_have_ids_of_their_own_which_they_keep(tmp_path):
    with RunFolder(tmp_path / "one", "mine") as one, RunFolder(tmp_path / "two", "mine") as two:
        assert re.fullmatch("mine_[0-9a-f]{8}", one.id) and one.id != two.id
    with RunFolder(tmp_path / "one", "renamed") as again:
        assert again.id == one.id


def test_a_chosen_id_is_that_of_the_folder_or_refused(tmp_path):
    with RunFolder(tmp_path, "mine", "fleet_92d02656") as folder:
        assert folder.id == "fleet_92d02656"
    with RunFolder(tmp_path, "mine", "fleet_92d02656"):
        pass
    with pytest.raises(UserError, match=r"run.id=other: .* belongs to the run fleet_92d02656; choose another run.out"):
        RunFolder(tmp_path, "mine", "other")
    with RunFolder(tmp_path, "mine"):
        """A refusal has released it."""


def test_a_second_process_is_refused_until_the_first_has_ended(tmp_path):
    first = subprocess.Popen(
        [sys.executable, "-c", USE, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    told = first.stdout.readline().strip()
    with pytest.raises(UserError, match="another process is using this folder"):
        RunFolder(tmp_path, "mine")
    first.kill()
    first.communicate()
    with RunFolder(tmp_path, "mine") as folder:
        assert folder.id == told


def test_of_many_that_start_at_once_one_wins_and_its_id_stays(tmp_path):
    def start(_: int) -> RunFolder | None:
        try:
            return RunFolder(tmp_path, "mine")
        except UserError:
            return None

    with ThreadPoolExecutor(16) as pool:
        (winner,) = [folder for folder in pool.map(start, range(64)) if folder is not None]
    winner.close()
    with RunFolder(tmp_path, "mine") as folder:
        assert folder.id == winner.id


@pytest.mark.parametrize("content", ["{", "[]", '{"id": 3}', '{"id": "../other"}', '{"id": ""}'])
def test_a_damaged_identity_is_refused_and_kept(tmp_path, content):
    (tmp_path / "run.json").write_text(content)
    with pytest.raises(UserError, match=r"run.json:? .*restore it, or choose another run.out"):
        RunFolder(tmp_path, "mine")
    assert (tmp_path / "run.json").read_text() == content


@pytest.mark.parametrize("target", ["/dev/full", "/dev/null", "/dev/zero"])
def test_an_identity_that_is_no_file_is_refused(tmp_path, target):
    (tmp_path / "run.json").symlink_to(target)
    with pytest.raises(UserError, match=r"run\.json is not a regular file"):
        RunFolder(tmp_path, "mine")


@pytest.mark.parametrize("name", ["a b/c", "..", "ü", "-x", "a" * 200, "fleet.v2"])
def test_any_name_gives_an_id_that_can_be_part_of_a_path(name):
    assert ID.fullmatch(new_id(name))
    assert new_id("fleet.v2").startswith("fleet.v2_")

"""A disk that is full while a checkpoint is written: one sentence, and the checkpoint before stays."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("megatron_fleet.trainer.megatron")

from policy_fixtures import make_batch, make_config, write_config
from test_run_store import save

from megatron_fleet.checkpoint.checkpoints import Checkpoint, Checkpoints
from megatron_fleet.checkpoint.saves import Saves
from megatron_fleet.config.errors import UserError
from megatron_fleet.config.schema import ParallelConfig
from megatron_fleet.config.sections.run import CheckpointConfig
from megatron_fleet.trainer.base import AdamParams, LossSpec
from megatron_fleet.trainer.group import open_trainer

DISK_BYTES = 48 << 20
LEFT = 64 << 10
"""Bytes that a full disk has left: small files fit, a rank's share does not."""


@pytest.fixture
def disk(tmp_path):
    """A small file system of its own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("needs the right to mount a file system")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(disk: Path) -> Path:
    """The file that takes what is left."""
    hog = disk / "hog"
    free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
    with hog.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, free - LEFT)
    return hog


def whole(folder: Path) -> list[int]:
    """Steps of the checkpoints, of which each is whole and nothing else is there."""
    found = [Checkpoint.open(path) for path in folder.iterdir()]
    for checkpoint in found:
        checkpoint.verify()
    return sorted(checkpoint.step for checkpoint in found)


def test_a_full_disk_is_seen_before_anything_is_written(disk):
    save(disk / "checkpoints", 1)
    fill(disk)
    with pytest.raises(UserError, match=r"checkpoints: the disk has [\d.]+ kB left, and the .*checkpoint\.keep\.$"):
        save(disk / "checkpoints", 2)
    assert whole(disk / "checkpoints") == [1]


@pytest.mark.slow
def test_a_disk_that_fills_up_while_ranks_write(disk, tmp_path, caplog):
    config = make_config(write_config(tmp_path / "model"), ParallelConfig(data=2))
    folder = disk / "checkpoints"

    async def story() -> None:
        async with open_trainer(config, "random") as trainer:
            copy_state, hogs = trainer.copy_state, []

            async def step() -> None:
                await trainer.forward_backward(make_batch(count=4), LossSpec.of(config.algorithm))
                await trainer.optim_step(AdamParams(1e-3))

            async def copy(path: Path):
                hogs.append(fill(disk))
                return await copy_state(path)

            def saves(on_failure: str) -> Saves:
                return Saves(CheckpointConfig(on_failure=on_failure), 1, trainer, Checkpoints(folder, keep=5), None)

            async def begin(saves: Saves, step: int) -> None:
                assert await saves.copy(step)
                saves.commit({"step": step})

            goes_on = saves("continue")
            await begin(goes_on, 1)
            await goes_on.finish()
            trainer.copy_state = copy
            await begin(goes_on, 2)
            await step()  # is trained meanwhile
            await goes_on.finish()
            assert goes_on.failed == 1 and goes_on.saved_step == 1
            assert "step 2 has no checkpoint: " in caplog.text and os.strerror(errno.ENOSPC) in caplog.text
            assert whole(folder) == [1]
            hogs[-1].unlink()
            stops = saves("stop")
            await begin(stops, 3)
            with pytest.raises(UserError, match=r"^step 3 has no checkpoint: .*No space left.*on_failure=continue\.$"):
                await stops.finish()
            assert whole(folder) == [1]
            hogs[-1].unlink()
            trainer.copy_state = copy_state
            await begin(goes_on, 4)
            await goes_on.finish()
            assert whole(folder) == [1, 4]
            await trainer.load_state(folder / "step_000001")

    asyncio.run(story())

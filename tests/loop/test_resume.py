"""Where a run begins: damaged checkpoints are passed over, records of an earlier run are never overwritten."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
from fake_trainer import STATE
from test_training import OVERRIDES, Run

from megatron_fleet import cli
from megatron_fleet.checkpoint.checkpoints import Checkpoint
from megatron_fleet.config.errors import UserError
from megatron_fleet.config.load import load
from megatron_fleet.loop.start import set_aside
from megatron_fleet.trainer.base import TrainerLost


def flip(out: Path, step: int) -> Path:
    """Flip one bit of a checkpoint's weights; the file."""
    file = out / "checkpoints" / f"step_{step:06d}" / STATE
    content = file.read_bytes()
    file.write_bytes(content[:-3] + bytes([content[-3] ^ 1]) + content[-2:])
    return file


async def test_flipped_bits_send_a_run_back_to_the_checkpoint_before(tmp_path, caplog):
    whole = Run(tmp_path / "whole", "run.steps=6")
    await whole.go()
    run = Run(tmp_path / "run", "run.steps=6")
    run.trainer.fail_next("export_hf", RuntimeError("power cut"))
    with pytest.raises(RuntimeError, match="power cut"):
        await run.go()
    damaged = flip(run.out, 6)
    run.take()
    run.fresh()
    await run.go()
    assert f"{damaged}: is damaged, its SHA-256" in caplog.text
    assert "the run goes on from step 4" in caplog.text
    assert run.take()[1:5] == ["wait_ready", "begin_update", "send_weights 4", "finish_update 4"]
    assert run.rows() == whole.rows()
    np.testing.assert_array_equal(run.trainer.weights, whole.trainer.weights)
    Checkpoint.open(damaged.parent).verify()  # saved anew


async def test_a_restarted_trainer_does_not_load_flipped_bits(tmp_path, caplog):
    whole = Run(tmp_path / "whole", "run.steps=6")
    await whole.go()
    run = Run(tmp_path / "run", "run.steps=6")
    collect = run.rollout.collect

    async def flipping(request, **callbacks):
        if request.step == 5 and not run.restarts:
            flip(run.out, 4)
            run.trainer.die("rank 3 was killed by SIGKILL")
        return await collect(request, **callbacks)

    run.rollout.collect = flipping
    await run.go()
    assert run.restarts == ["rank 3 was killed by SIGKILL"]
    assert "the run goes on from step 2" in caplog.text
    assert run.rows() == whole.rows()


def records(out: Path) -> dict[str, bytes | None]:
    """Everything below a folder."""
    return {path.relative_to(out).as_posix(): path.read_bytes() if path.is_file() else None for path in out.rglob("*")}


async def test_a_run_whose_checkpoints_are_all_damaged_is_refused_and_left_alone(tmp_path, capsys):
    run = Run(tmp_path / "run")
    await run.go()
    flip(run.out, 2)
    damaged, before = flip(run.out, 4), records(run.out)
    assert await asyncio.to_thread(cli.main, ["train", *OVERRIDES, f"run.out={run.out}"]) == 2
    printed = capsys.readouterr().err
    assert f"error: {damaged}: is damaged, its SHA-256 is not that of the manifest.json, and" in printed
    assert "choose another run.out, or start over with run.resume=never" in printed
    assert records(run.out) == before


async def test_never_to_resume_moves_the_earlier_records_aside(tmp_path):
    first = Run(tmp_path / "run")
    await first.go()
    second = Run(tmp_path / "run", "run.resume=never", "run.seed=7")
    before, earlier = records(first.out), first.rows()
    second.trainer._fail = {"optim_step": {4: TrainerLost("gone")}}
    await second.go()
    assert second.restarts == ["gone"], "a restart goes on from the checkpoint of the same run"
    assert records(tmp_path / "run.1") == before
    assert [row["step"] for row in second.rows()] == [1, 2, 3, 4]
    assert second.rows() != earlier
    await Run(tmp_path / "run", "run.resume=never").go()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "run.1", "run.2"]


async def test_never_to_resume_does_not_move_what_the_run_needs(tmp_path):
    run = Run(tmp_path / "run")
    await run.go()
    (run.out / "model").mkdir()
    config = load([*OVERRIDES, f"run.out={run.out}", "run.resume=never", f"model.path={run.out}/model"])
    with pytest.raises(UserError, match=r"moves this folder aside, and the run needs .*/model in it; choose another"):
        set_aside(config)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


async def test_a_run_that_never_came_to_a_record_starts_where_it_is(tmp_path):
    config = load([*OVERRIDES, f"run.out={tmp_path}/run", "run.resume=never"])
    (tmp_path / "run" / "logs").mkdir(parents=True)
    set_aside(config)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]

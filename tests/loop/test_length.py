"""Length of a run in epochs: as many steps as draw every task that often, also when the run is resumed."""

from __future__ import annotations

from collections import Counter

import pytest
from test_training import OVERRIDES, Run

from megatron_fleet import cli
from megatron_fleet.config import validate
from megatron_fleet.config.errors import UserError
from megatron_fleet.config.load import load
from megatron_fleet.data.dataset import run_dataset
from megatron_fleet.loop.run_tasks import in_steps

EPOCHS = ["run.steps=null", "rollout.prompts_per_step=30"]


def steps(*overrides: str) -> int:
    return in_steps(load([*OVERRIDES, *EPOCHS, "run.out=nowhere", *overrides])).run.last_step


def test_an_epoch_is_as_many_prompts_as_there_are_tasks_to_draw_from():
    train = run_dataset(load([*OVERRIDES, "run.out=nowhere"])).split.train
    assert steps("run.epochs=1") == -(-len(train) // 30)
    assert steps("run.epochs=0.5") == -(-len(train) // 60)
    assert steps("run.epochs=3", "rollout.prompts_per_step=1") == 3 * len(train)
    assert steps("run.epochs=0.1", "rollout.prompts_per_step=1") == -(-len(train) // 10)  # not one more by rounding
    envs = Counter(task.env_key for task in train)
    shares = ",".join(f"{env}: {int(env == min(envs))}" for env in envs)
    mixture = ["data.mixture.weights=explicit", f"data.mixture.shares={{{shares}}}", "rollout.prompts_per_step=1"]
    assert steps("run.epochs=1", *mixture) == envs[min(envs)] < len(train)


async def test_a_resumed_run_ends_when_each_task_was_drawn_once(tmp_path):
    run = Run(tmp_path, *EPOCHS, "run.epochs=1")
    tasks = len(run.data[0])
    run.trainer.fail_next("optim_step", RuntimeError("power cut"), after=3)
    with pytest.raises(RuntimeError, match="power cut"):
        await run.go()
    run.fresh()
    await run.go()
    rows = run.rows()
    assert [row["step"] for row in rows] == list(range(1, -(-tasks // 30) + 1))
    passes = [rows[-1][name] for name in rows[-1] if name.startswith("data/epoch/")]
    assert passes and all(1 <= each < 2 for each in passes)


def test_the_length_is_given_once():
    with pytest.raises(UserError, match=r"run\.steps=4 and run\.epochs=2 exclude each other; set run\.steps=null"):
        validate.check(load([*OVERRIDES, "run.out=nowhere", "run.epochs=2"]))
    with pytest.raises(UserError, match="both null"):
        validate.check(load([*OVERRIDES, "run.out=nowhere", "run.steps=null"]))


@pytest.mark.slow
def test_a_dry_run_shows_the_steps(tmp_path, capsys):
    command = ["train", "experiment=quickstart", "run.steps=null", "run.epochs=2", "--dry-run", f"run.out={tmp_path}/o"]
    assert cli.main(command) == 0
    printed = capsys.readouterr().out
    assert "run.epochs=2 of" in printed
    assert f"\n  steps: {in_steps(load(command[1:4])).run.last_step}\n  epochs: null\n" in printed

"""Real ranks that take turns with engines: sharded optimizer states, split matrices and stages leave and come back."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("megatron_fleet.trainer.megatron")

import pytest_asyncio
from policy_fixtures import make_batch, make_config, write_config
from turns import in_turn

from megatron_fleet.config.schema import Config, ParallelConfig
from megatron_fleet.loop.colocation import Colocation, open_colocation
from megatron_fleet.loop.memory_budget import GIB
from megatron_fleet.trainer.base import AdamParams, LossSpec, Trainer
from megatron_fleet.trainer.group import open_trainer

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

LAYOUTS = {"data2": {"data": 2}, "tensor2": {"tensor": 2}, "pipeline2": {"pipeline": 2}}


class NoEngines:
    """They share the devices and take nothing."""

    async def sleep(self):
        return "there are none"

    async def wake(self, part):
        pass


async def train(config: Config, trainer: Trainer, colocation: Colocation | None) -> list[Any]:
    """Three steps; with ``colocation`` the trainer leaves after each and comes back."""
    batch, reports = make_batch(count=4, longest=40), []

    async def sync() -> None:
        await trainer.forward(batch)  # parameters are there

    for _ in range(3):
        reports.append(await trainer.forward_backward(batch, LossSpec.of(config.algorithm)))
        reports.append(await trainer.optim_step(AdamParams.of(config.policy.optimizer, 1e-3)))
        if colocation is not None:
            await colocation.to_engines(sync)
            await colocation.to_trainer()
    return reports


async def state(trainer: Trainer, folder: Path) -> dict[str, str]:
    folder.mkdir()
    files = await trainer.save_state(folder)
    return {name: entry["sha256"] for name, entry in files.items() if name.endswith(".distcp")}


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=in_turn(LAYOUTS, ("data2",), of=2))
async def run(request, tmp_path_factory) -> AsyncIterator[dict[str, Any]]:
    """The same steps with and without taking turns, in the same ranks."""
    folder = tmp_path_factory.mktemp(request.param)
    model = write_config(folder / "model", num_hidden_layers=2)
    tree = make_config(model, ParallelConfig(**LAYOUTS[request.param]), dtype="bfloat16").model_dump()
    tree["run"]["out"] = str(folder / "out")
    tree["rollout"]["engine"] |= {"colocated": True}
    config = Config.model_validate(tree)
    async with open_trainer(config, init="random") as trainer:
        await state(trainer, folder / "before")
        straight = await train(config, trainer, None), await state(trainer, folder / "straight")
        await trainer.load_state(folder / "before")
        colocation = await open_colocation(config.rollout.engine, config.run, trainer, NoEngines())
        taking_turns = await train(config, trainer, colocation), await state(trainer, folder / "turns")
    yield {
        "layout": request.param,
        "straight": straight,
        "taking_turns": taking_turns,
        "sizes": trainer.info.part_bytes,
        "metrics": colocation.memory(),
    }


async def test_training_is_the_same_to_the_bit(run):
    assert run["taking_turns"] == run["straight"]


async def test_the_fuller_rank_is_reported(run):
    for part in ("parameters", "gradients", "optimizer"):
        most = max(rank[part] for rank in run["sizes"])
        assert run["metrics"][f"memory/train/{part}"] == most / GIB
        assert run["metrics"][f"memory/roll/{part}"] == 0
    assert run["metrics"]["memory/sync/parameters"] > 0


async def test_data_parallel_ranks_share_the_optimizer(run):
    share = 2 if run["layout"] == "data2" else 1
    for rank in run["sizes"]:
        assert rank["optimizer"] == pytest.approx(6 * rank["parameters"] / share, rel=0.05)

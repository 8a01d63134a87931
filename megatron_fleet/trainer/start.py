"""Start of a trainer made of ranks, from a configuration."""

from __future__ import annotations

import os
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal

from megatron_fleet.cluster.inventory import LOOPBACK, local_inventory
from megatron_fleet.cluster.launcher import LocalRanks, RankStarter
from megatron_fleet.cluster.placement import Wanted, place, ranks_by_host
from megatron_fleet.config.schema import Config
from megatron_fleet.models.flops import SequenceCost
from megatron_fleet.models.hf_config import read_model
from megatron_fleet.trainer.group import TrainerGroup
from megatron_fleet.trainer.links import RankListener
from megatron_fleet.weights.hf_folder import read_config

Init = Literal["hf", "random", "none"]
"""Source of the weights; see `MegatronPolicy`."""


@asynccontextmanager
async def open_trainer(config: Config, init: Init = "hf") -> AsyncIterator[TrainerGroup]:
    """Start a trainer's ranks on this machine, connected and built; its logs are below ``run.out``.

    Raises:
        UserError: model, layout and machine do not fit each other.
        TrainerLost: a rank died.
    """
    token, world, inventory = run_token(), config.parallel.world_size, local_inventory(os.environ)
    (ranks,) = ranks_by_host(place(inventory, Wanted(world, engines=0)), inventory, config.policy.threads).values()
    listener = RankListener(token, None, world)
    await listener.listen(LOOPBACK, 0)
    starter = LocalRanks(ranks, Path(config.run.out, "logs"))
    async with start_trainer(config, listener, starter, token, init) as group:
        await group.gather()
        await group.build()
        yield group


@asynccontextmanager
async def start_trainer(
    config: Config, listener: RankListener, starter: RankStarter, token: str, init: Init = "hf"
) -> AsyncIterator[TrainerGroup]:
    """Open a trainer for the ranks that connect to ``listener``, which `TrainerGroup.gather` starts; leaving ends all
    of them.
    """
    run = config.run.model_copy(update={"out": str(Path(config.run.out).absolute())})
    listener.configure(config.model_copy(update={"run": run}).model_dump_json())
    cost = SequenceCost.of(read_model(read_config(config.model.path)))
    group = TrainerGroup(config, listener, starter, token, cost, init)
    try:
        yield group
    finally:
        await group.close()


def run_token() -> str:
    """Secret that every socket of a run requires: ``MFLEET_TOKEN``, or a new one."""
    # Ranks and nodes ignore white space around it too (`cluster.rank_identity`).
    return os.environ.get("MFLEET_TOKEN", "").strip() or secrets.token_hex(32)

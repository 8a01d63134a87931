"""Open a trainer made of ranks, as a configuration says: ranks of this machine, or ranks that somebody else starts."""

from __future__ import annotations

import os
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal

from megatron_fleet.cluster.launcher import ExternalRanks, LocalRanks, RankStarter
from megatron_fleet.cluster.rank_identity import controller_address
from megatron_fleet.config.schema import Config
from megatron_fleet.trainer.group import TrainerGroup
from megatron_fleet.trainer.links import RankListener
from megatron_fleet.trainer.packing.flops import SequenceCost
from megatron_fleet.weights.hf_config import read_model
from megatron_fleet.weights.hf_folder import read_config


@asynccontextmanager
async def open_trainer(config: Config, init: Literal["hf", "random", "none"] = "hf") -> AsyncIterator[TrainerGroup]:
    """A trainer whose ranks are started, connected and built; its logs are below ``run.out``.

    Raises:
        UserError: model, layout and machine do not fit each other.
        TrainerLost: a rank died.
    """
    async with start_trainer(config, run_token(), init) as group:
        await group.gather()
        await group.build()
        yield group


@asynccontextmanager
async def start_trainer(
    config: Config, token: str, init: Literal["hf", "random", "none"] = "hf"
) -> AsyncIterator[TrainerGroup]:
    """A trainer that listens for its ranks, which `TrainerGroup.gather` starts; leaving ends all of them."""
    external = config.cluster.ranks == "external"
    host, port = "127.0.0.1", "0"
    starter: RankStarter
    if external:
        address, _ = controller_address(os.environ)
        host, port = address.rsplit(":", 1)
        starter = ExternalRanks()
    else:
        starter = LocalRanks(config.parallel.world_size, config.policy.threads, Path(config.run.out) / "logs")
    listener = RankListener(token, config.model_dump_json(), config.parallel.world_size)
    await listener.listen(host, int(port))
    cost = SequenceCost.of(read_model(read_config(config.model.path)))
    group = TrainerGroup(config, listener, starter, token, cost, init)
    try:
        yield group
    finally:
        await group.close()


def run_token() -> str:
    """The secret that every socket of a run asks for: ``MFLEET_TOKEN``, or a new one."""
    return os.environ.get("MFLEET_TOKEN") or secrets.token_hex(32)

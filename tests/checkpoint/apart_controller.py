"""Controller of test_apart_ranks: resumes, takes an optimizer step, saves. Argument: the configuration as JSON.

Prints one line of JSON: the step from which it resumed, the log-probs before and after its own, and the names in its
folder of checkpoints.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

from policy_fixtures import make_batch

from megatron_fleet.checkpoint.resume_point import open_checkpoints
from megatron_fleet.checkpoint.saves import Saves
from megatron_fleet.cluster.placement import PlacementRequest, place
from megatron_fleet.cluster.rank_identity import run_token
from megatron_fleet.config.schema import Config
from megatron_fleet.loop.hosts import open_hosts
from megatron_fleet.trainer.base import AdamParams, LossSpec
from megatron_fleet.trainer.group import TrainerGroup, open_group


async def main(config: Config) -> None:
    token = run_token(os.environ)
    with open_checkpoints(config) as (checkpoints, uploader, found):
        async with open_hosts(config, token) as hosts:
            starter = hosts.starter(
                config, place(hosts.inventory, PlacementRequest(config.parallel.world_size, engines=0))
            )
            async with open_group(config, hosts.listener, starter, token, "random") as trainer:
                await trainer.gather()
                await trainer.build()
                saves = Saves(config.checkpoint, config.run.last_step, trainer, checkpoints, uploader)
                await saves.resume(found)
                step = 0 if found is None else found.step
                before = await total(trainer)
                await trainer.forward_backward(make_batch(), LossSpec.of(config.algorithm))
                await trainer.optim_step(AdamParams(1e-3))
                after = await total(trainer)
                assert await saves.copy(step + 1)
                saves.commit({"step": step + 1})
                await saves.finish()
                apart = trainer.info.hosts_apart
    left = sorted(path.name for path in Path(config.run.out, "checkpoints").iterdir())
    print(json.dumps({"from": step, "before": before, "after": after, "apart": apart, "left": left}))


async def total(trainer: TrainerGroup) -> float:
    """Sum of all log-probs."""
    return float(sum(values.sum() for values in await trainer.forward(make_batch())))


if __name__ == "__main__":
    asyncio.run(main(Config.model_validate_json(sys.argv[1])))

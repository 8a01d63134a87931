"""`mfleet train`: assemble a run from its configuration, train, and stop everything that was started."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from contextlib import AsyncExitStack
from pathlib import Path

from megatron_fleet.checkpoint.checkpoints import Checkpoint, Checkpoints
from megatron_fleet.checkpoint.exports import Exports, open_exports
from megatron_fleet.checkpoint.resume_point import open_checkpoints, set_aside
from megatron_fleet.checkpoint.saves import Saves
from megatron_fleet.checkpoint.store import Uploader
from megatron_fleet.cluster.launcher import episode_python
from megatron_fleet.cluster.placement import Placement, PlacementRequest, place
from megatron_fleet.cluster.rank_identity import run_token
from megatron_fleet.config import validate
from megatron_fleet.config.load import dump_resolved
from megatron_fleet.config.schema import Config
from megatron_fleet.loop.attempt import open_attempts
from megatron_fleet.loop.dry_run import draw
from megatron_fleet.loop.engine_weights import EngineWeights
from megatron_fleet.loop.hosts import open_hosts
from megatron_fleet.loop.live import LiveRun
from megatron_fleet.loop.run_tasks import load_data
from megatron_fleet.loop.stopping import StopRequest, until_stopped
from megatron_fleet.loop.train import Training
from megatron_fleet.planning.hardware import other_kind
from megatron_fleet.rollout.service import RolloutService, RolloutSite
from megatron_fleet.storage.local import write_atomically
from megatron_fleet.storage.run_folder import RunFolder
from megatron_fleet.telemetry.announcements import Announcements, announced
from megatron_fleet.trainer.registry import RankHosts, trainer_factory
from megatron_fleet.weight_sync.registry import make_transport

log = logging.getLogger(__name__)


def main(config: Config) -> int:
    """Train, or resume training; returns the exit status.

    Raises:
        UserError: a problem that the user can fix.
    """
    out = Path(config.run.out)
    if config.run.resume == "never":
        set_aside(config)
    with RunFolder(out, config.run.name, config.run.id) as folder:
        config = config.model_copy(update={"run": config.run.model_copy(update={"id": folder.id})})
        with (
            announced(config) as announcements,
            open_checkpoints(config) as (checkpoints, uploader, found),
            open_exports(config, checkpoints, uploader, found) as exports,
        ):
            write_atomically(out / "config.json", dump_resolved(config).encode())
            announcements.began(None if found is None else found.step)

            async def train(stop: StopRequest) -> None:
                stop.listeners.append(announcements.stopping)
                await _train(config, checkpoints, uploader, exports, found, stop, announcements)

            announcements.status = status = asyncio.run(until_stopped(train, config.run.time_limit_s))
            if exports is not None and status == 0:
                exports.finish(config.checkpoint.store.drain_timeout_s)
            return status


async def _train(
    config: Config,
    checkpoints: Checkpoints,
    uploader: Uploader | None,
    exports: Exports | None,
    found: Checkpoint | None,
    stop: StopRequest,
    announcements: Announcements,
) -> None:
    started = time.time()
    stop.saved_step = None if found is None else found.step
    train, held_out = load_data(config)
    out, token = Path(config.run.out), run_token(os.environ)
    async with AsyncExitStack() as stack:
        live = stack.enter_context(LiveRun(config.run, config.logging, started))
        hosts = await stack.enter_async_context(open_hosts(config, token))
        live.nodes = hosts.nodes
        inventory = hosts.inventory
        placement = place(inventory, PlacementRequest.of(config.ranks, config.rollout.engine, config.eval.engines))
        if problem := other_kind(config.cluster, [device.kind for host in inventory.hosts for device in host.devices]):
            log.warning("%s", problem)
        (out / "logs").mkdir(exist_ok=True)
        write_atomically(out / "logs" / "placement.txt", f"{draw(inventory, placement)}\n".encode())
        config = with_placement(config, placement)
        rank_hosts = RankHosts(hosts.listener, token, lambda: hosts.starter(config, placement))
        trainer = await stack.enter_async_context(trainer_factory(config.policy.trainer)(config, rank_hosts))
        live.ranks = trainer.ranks
        site = RolloutSite(inventory, placement, token, hosts.nodes)
        rollout = await stack.enter_async_context(RolloutService(config, out, episode_python(), site))
        live.rollout = rollout
        first = inventory.host(placement.ranks[0].host) if placement.ranks else inventory.hosts[0]
        transport = make_transport(placement.transport, {"address": first.address, "url": weights_url(config)})
        stack.callback(transport.close)
        engines = EngineWeights(config.rollout, config.run, trainer, rollout, transport)
        own = engines if config.eval.engines else None
        attempts = open_attempts(config, train, held_out, rollout, lambda: started, [announcements], own)
        saves = Saves(config.checkpoint, config.run.last_step, trainer, checkpoints, uploader, exports)
        await Training(config, trainer, engines, attempts, saves, stop).run(found)


def weights_url(config: Config) -> str:
    """Return the folder of the weights for the ``disk`` transport: an absolute path, ``s3://…`` or ``gs://…``."""
    url = config.rollout.engine.weights_url or str(Path(config.run.out, "weights"))
    return url if "://" in url else str(Path(url).absolute())


def with_placement(config: Config, placement: Placement) -> Config:
    """Return ``config`` with ``rollout.engine.colocated`` and ``.transport`` set as the placement decided.

    Raises:
        UserError: the decision conflicts with another key.
    """
    decided = {"colocated": placement.colocated, "transport": placement.transport}
    engine = config.rollout.engine.model_copy(update=decided)
    placed = config.model_copy(update={"rollout": config.rollout.model_copy(update={"engine": engine})})
    validate.check(placed)
    return placed

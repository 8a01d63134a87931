"""The training loop. Every rank runs it; rank 0 is also the driver, which owns the rollout and the records."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from megatron_fleet.algorithms.losses import LossFn, make_loss, needs_proximal
from megatron_fleet.checkpoint.checkpoints import Checkpoint, Checkpoints
from megatron_fleet.config.errors import UserError
from megatron_fleet.config.schema import Config
from megatron_fleet.loop.colocation import Devices, open_devices
from megatron_fleet.loop.driver import Driver, open_driver
from megatron_fleet.loop.exchange import Exchange
from megatron_fleet.loop.guard import StepGuard, Update
from megatron_fleet.loop.probe import probe_data
from megatron_fleet.loop.schedule import lr_at
from megatron_fleet.platform.communicator import TorchCommunicator
from megatron_fleet.platform.device import device
from megatron_fleet.trainer.base import LossReport, OptimReport, Rows
from megatron_fleet.trainer.megatron.policy import MegatronPolicy
from megatron_fleet.trainer.row_losses import RowLosses
from megatron_fleet.weight_sync.publish import Publisher, make_publisher

Reports = list[tuple[LossReport, OptimReport]]


def main(config: Config) -> int:
    """Train, or go on training; returns the exit status.

    Raises:
        UserError: something the user can mend.
    """
    started = time.time()
    with open_driver(config) as driver:
        if driver is not None and config.rollout.engine.colocated:
            # Engines find out how much memory they may take while they are alone on the devices.
            driver.rollout.sleep()
        with closing(MegatronPolicy(config)) as policy:
            train(config, policy, driver, Exchange(), started)
    return 0


def train(config: Config, policy: MegatronPolicy, driver: Driver | None, ranks: Exchange, started: float) -> None:
    """Roll out, update, publish; evaluate and save when due.

    Args:
        driver: on rank 0; ``None`` elsewhere.
        started: unix time at which this attempt began.
    """
    world = TorchCommunicator()
    checkpoints = Checkpoints(Path(config.run.out) / "checkpoints", config.checkpoint.keep, world)
    if config.algorithm.kl.coef > 0:
        policy.keep_reference()
    state = restore(config, policy, checkpoints, ranks)
    ranks.share(driver and driver.begin, state, started)
    guard = StepGuard(config, policy, world)
    if state is not None:
        guard.load(state["guard"])
    step = 0 if state is None else int(state["step"])
    data_ranks = world.all_gather(policy.dp_rank)
    source = policy.weight_source()
    client = driver and driver.rollout.weight_client()
    devices = open_devices(config, policy, driver and driver.rollout, ranks, world)
    with closing(make_publisher(source, client, world, device(), config.model.path)) as publisher:
        to_engines(config, policy, driver, ranks, devices, publisher, step)
        if step == 0 and config.eval.at_start:
            ranks.share(driver and driver.evaluate_before)
        while step < config.run.steps:
            clock = Clock()
            updates = ranks.scatter(driver and driver.collect, step, data_ranks)
            devices.to_trainer()
            with clock.phase("policy_train"):
                reports = update(config, policy, guard, updates, step)
            ranks.share(driver and driver.finish_evaluation)
            step += 1
            with clock.phase("sync_weights"):
                to_engines(config, policy, driver, ranks, devices, publisher, step)
            evaluate, seconds = evaluation_due(config, step), clock.read() | devices.read_seconds()
            ranks.share(driver and driver.finish_step, step, reports, seconds, devices.memory(), evaluate)
            if checkpoint_due(config, step) or guard.stuck:
                books = ranks.share(driver and driver.state, step)
                with clock.phase("save_checkpoints"), devices.borrowed(partial(publisher.publish, step)):
                    checkpoints.save(step, policy.save_state, {**books, "guard": guard.state()})
                ranks.share(driver and driver.saved, step, clock.seconds["save_checkpoints"])
            guard.stop_if_stuck()
    if config.checkpoint.export_hf:
        devices.to_trainer()
        policy.export_hf(Path(config.run.out) / "hf")
    ranks.share(driver and driver.finish)


def to_engines(
    config: Config,
    policy: MegatronPolicy,
    driver: Driver | None,
    ranks: Exchange,
    devices: Devices,
    publisher: Publisher,
    version: int,
) -> None:
    """Publish the present weights and let the engines play with them.

    When it is due, compare log-probs of a few tokens on every engine with the policy's, who computes them before it
    leaves.
    """
    interval = config.rollout.engine.probe_interval
    if not interval or version % interval:
        devices.to_engines(partial(publisher.publish, version))
        return
    data = probe_data(policy.vocab_size, config.policy.row_tokens)
    (expected,) = policy.forward([data], temperature=1.0)
    devices.to_engines(partial(publisher.publish, version))
    ranks.share(driver and driver.check_engines, version, data, expected)


def update(config: Config, policy: MegatronPolicy, guard: StepGuard, updates: Sequence[Rows], step: int) -> Reports:
    """One optimizer step for each of ``updates``: this rank's rows of each part of the batch.

    With one part, π_old is π itself and no pass is spent on it; with several, it is computed before the first, for
    losses that ask for it.
    """
    loss = make_loss(config.algorithm)
    if config.algorithm.kl.coef > 0:
        updates = [with_logprobs(rows, "reference_logprobs", policy.forward(rows, "reference")) for rows in updates]
    if len(updates) > 1 and needs_proximal(config.algorithm):
        updates = [with_logprobs(rows, "proximal_logprobs", policy.forward(rows)) for rows in updates]
    return [one_update(config, policy, guard, rows, loss, step, part) for part, rows in enumerate(updates)]


def one_update(
    config: Config, policy: MegatronPolicy, guard: StepGuard, rows: Rows, loss: LossFn, step: int, part: int
) -> tuple[LossReport, OptimReport]:
    """Gradients of ``rows`` and one optimizer step, number ``part`` of training step ``step``."""
    parts = config.policy.updates_per_batch
    lr = lr_at(step * parts + part, config.policy.optimizer, config.run.steps * parts)
    losses = RowLosses(loss)
    report = policy.forward_backward(rows, losses)
    return report, guard.optim_step(Update(step + 1, part, lr, rows, losses, report))


def with_logprobs(rows: Rows, name: str, values: list[list[np.ndarray]]) -> Rows:
    """``rows`` with field ``name`` of every Datum filled in."""
    return [
        [replace(datum, **{name: value}) for datum, value in zip(row, found, strict=True)]
        for row, found in zip(rows, values, strict=True)
    ]


def restore(config: Config, policy: MegatronPolicy, checkpoints: Checkpoints, ranks: Exchange) -> dict[str, Any] | None:
    """Load the newest whole checkpoint; its trainer state, or ``None`` when the run begins anew.

    Raises:
        UserError: ``run.resume=never`` although there is something to resume, or the run is over already.
    """
    found: Checkpoint | None = checkpoints.latest()
    if found is None:
        return None
    if config.run.resume == "never":
        raise UserError(
            f"run.out={config.run.out} holds a checkpoint of step {found.step} and run.resume=never; choose another "
            f"run.out or remove the folder."
        )
    if found.step > config.run.steps:
        raise UserError(
            f"run.steps={config.run.steps} is below step {found.step} of {found.path}; raise it or choose another "
            f"run.out."
        )
    policy.load_state(found.path)
    return ranks.share(found.trainer_state)


def evaluation_due(config: Config, step: int) -> bool:
    """Evaluate after ``step`` steps?"""
    if step == config.run.steps:
        return config.eval.at_end
    return config.eval.interval > 0 and step % config.eval.interval == 0


def checkpoint_due(config: Config, step: int) -> bool:
    """Save after ``step`` steps? Always after the last one."""
    return step == config.run.steps or (config.checkpoint.interval > 0 and step % config.checkpoint.interval == 0)


@dataclass
class Clock:
    """Seconds of the phases of one step."""

    began: float = field(default_factory=time.monotonic)
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        self.seconds[name] = time.monotonic() - began

    def read(self) -> dict[str, float]:
        """The phases so far, and ``step`` from the clock's start until now."""
        return {**self.seconds, "step": time.monotonic() - self.began}

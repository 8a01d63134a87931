"""Optimizer steps of one batch, and their learning rate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from megatron_fleet.algorithms.datum import Datum
from megatron_fleet.algorithms.loss_metrics import needs_proximal
from megatron_fleet.config.schema import AlgorithmConfig, OptimizerConfig, PolicyConfig, RunConfig
from megatron_fleet.loop.guard import StepGuard
from megatron_fleet.trainer.base import LossReport, LossSpec, OptimReport, Trainer

Reports = list[tuple[LossReport, OptimReport]]


async def update(
    algorithm: AlgorithmConfig,
    policy: PolicyConfig,
    run: RunConfig,
    trainer: Trainer,
    guard: StepGuard,
    updates: Sequence[Sequence[Datum]],
    step: int,
) -> Reports:
    """Take one optimizer step for each of ``updates``, the parts of the batch of training step ``step`` (from 0).

    With one part, π_old equals π and needs no forward pass. With several parts it is computed before the first update,
    for losses that need it.
    """
    if algorithm.kl.coef > 0:
        updates = [with_logprobs(data, "reference", await trainer.forward(data, "reference")) for data in updates]
    if len(updates) > 1 and needs_proximal(algorithm):
        updates = [with_logprobs(data, "proximal", await trainer.forward(data)) for data in updates]
    parts, loss, reports = policy.updates_per_batch, LossSpec.of(algorithm), []
    for part, data in enumerate(updates):
        lr = lr_at(step * parts + part, policy.optimizer, run.last_step * parts)
        reports.append(await guard.update(step + 1, part, lr, data, loss))
    return reports


def with_logprobs(data: Sequence[Datum], name: str, values: Sequence[np.ndarray]) -> list[Datum]:
    """Return ``data`` with ``values`` as the array ``name``."""
    return [replace(datum, arrays=datum.arrays | {name: found}) for datum, found in zip(data, values, strict=True)]


def lr_at(step: int, optimizer: OptimizerConfig, total_steps: int) -> float:
    """Return the learning rate of optimizer step ``step`` (from 0) of ``total_steps``.

    Linear warm-up to ``lr`` over ``warmup_steps`` (the rate of step 0 is above 0), then ``schedule`` down to
    ``min_lr``, reached one step after the last, as in transformers: with a ``min_lr`` of 0 the last step still learns.
    """
    if step < optimizer.warmup_steps:
        return optimizer.lr * (step + 1) / optimizer.warmup_steps
    if optimizer.schedule == "constant":
        return optimizer.lr
    span = max(1, total_steps - optimizer.warmup_steps)
    progress = min(1.0, (step - optimizer.warmup_steps) / span)
    left = 1 - progress if optimizer.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return optimizer.min_lr + (optimizer.lr - optimizer.min_lr) * left

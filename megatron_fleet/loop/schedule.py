"""Learning-rate schedule."""

from __future__ import annotations

import math

from megatron_fleet.config.schema import OptimizerConfig


def lr_at(step: int, optimizer: OptimizerConfig, total_steps: int) -> float:
    """Learning rate of optimizer step ``step`` (from 0) of ``total_steps``.

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

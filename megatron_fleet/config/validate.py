"""Validation across several keys. Each error names the keys, their values and the fix."""

from __future__ import annotations

from megatron_fleet.config.errors import UserError
from megatron_fleet.config.rules import (
    agent,
    algorithm,
    env,
    evaluation,
    mixture,
    provisioning,
    rollout,
    tracking,
    trainer,
    values,
)
from megatron_fleet.config.schema import Config

RULES = (
    *values.RULES,
    *rollout.RULES,
    *env.RULES,
    *provisioning.RULES,
    *trainer.RULES,
    *algorithm.RULES,
    *evaluation.RULES,
    *mixture.RULES,
    *agent.RULES,
    *tracking.RULES,
)


def check(config: Config) -> None:
    """Reject combinations that cannot work, without accessing files or machines.

    Raises:
        UserError: the first impossible combination found.
    """
    for rule in RULES:
        if problem := rule(config):
            raise UserError(problem)

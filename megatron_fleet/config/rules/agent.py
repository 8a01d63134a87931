"""Validation rules for `agent`."""

from __future__ import annotations

from megatron_fleet.config.rules.rule import Rule
from megatron_fleet.config.schema import Config


def _step_wise_has_thinking(c: Config) -> str | None:
    if not c.agent.step_wise or c.rollout.thinking:
        return None
    return (
        "agent.step_wise=true leaves out the thinking of earlier turns, but with rollout.thinking=false there is none; "
        "set agent.step_wise=false or rollout.thinking=true."
    )


RULES: tuple[Rule, ...] = (_step_wise_has_thinking,)

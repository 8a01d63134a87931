"""Validation rules for `env.faults` and `env.provisioning`."""

from __future__ import annotations

from megatron_fleet.config.rules.rule import Rule
from megatron_fleet.config.schema import Config
from megatron_fleet.config.sections.faults import FaultRatesConfig


def _only_the_embedded_fleet_fails_on_purpose(c: Config) -> str | None:
    if c.env.kind == "embedded":
        return None
    for name in FaultRatesConfig.model_fields:
        if name.endswith("_rate") and getattr(c.env.faults, name) > 0:
            return (
                f"env.faults.{name}={getattr(c.env.faults, name):g} has no effect with env.kind={c.env.kind}: only the "
                f"embedded fleet fails on purpose; set env.kind=embedded or env.faults.{name}=0."
            )
    return None


def _slow_is_not_hanging(c: Config) -> str | None:
    faults, limit = c.env.faults, c.env.step_timeout_s
    if not faults.slow_rate or faults.slow_s < limit:
        return None
    return (
        f"env.faults.slow_s={faults.slow_s:g} is not below env.step_timeout_s={limit:g}, so that slow tools would all "
        f"be lost; lower env.faults.slow_s, or use env.faults.hang_rate for tools that never answer."
    )


def _starts_grow(c: Config) -> str | None:
    p = c.env.provisioning
    if p.starts_at_once <= p.max_starts_at_once:
        return None
    return (
        f"env.provisioning.starts_at_once={p.starts_at_once} is above env.provisioning.max_starts_at_once="
        f"{p.max_starts_at_once}; lower the first or raise the second."
    )


def _every_worker_may_start(c: Config) -> str | None:
    total, workers = c.env.provisioning.starts_at_once, c.rollout.workers
    if total >= workers:
        return None
    return (
        f"env.provisioning.starts_at_once={total} is the total of rollout.workers={workers} processes, each of "
        f"which must be able to start one; raise the first or lower the second."
    )


RULES: tuple[Rule, ...] = (
    _only_the_embedded_fleet_fails_on_purpose,
    _slow_is_not_hanging,
    _starts_grow,
    _every_worker_may_start,
)

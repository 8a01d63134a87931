"""Provisioning metrics: environment starts, retries, quarantine, and event-loop lag of the workers.

Formulas: ``registry.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_fleet.agents.trajectory import Group, Trajectory
from megatron_fleet.telemetry.episodes import by_environment, trajectories_of

GAUGES = ("provision_s", "start_limit")


def provisioning_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Compute metrics from the numbers that workers record in each episode, over the episodes that have them."""
    out: dict[str, float] = {}
    for env, own in by_environment(groups).items():
        episodes = trajectories_of(own)
        out[f"environment/{env}/quarantined"] = sum(t.metrics.get("quarantined", 0.0) for t in episodes)
        out[f"environment/{env}/breaker_open"] = max(_told(episodes, "breaker_open"), default=0.0)
        out[f"environment/{env}/start_retries"] = sum(_told(episodes, "start_retries"))
        out[f"environment/{env}/attempts_retried"] = sum(_told(episodes, "attempts_retried"))
        for name in GAUGES:
            if told := _told(episodes, name):
                out[f"timing/{name}/{env}"] = sum(told) / len(told)
    if lags := _told(trajectories_of(groups), "loop_lag_p99"):
        out["timing/loop_lag_p99"] = max(lags)
    return out


def _told(episodes: Sequence[Trajectory], name: str) -> list[float]:
    return [t.metrics[name] for t in episodes if name in t.metrics]

"""Metrics and distributions of a training step. Names and formulas are in ``megatron_fleet.telemetry.registry``.

A mean over no values is absent, never 0; counts are always present.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np

from megatron_fleet.agents.trajectory import Group, Trajectory
from megatron_fleet.algorithms.batch import Batch, Fate
from megatron_fleet.algorithms.loss_metrics import NORMALISED, finalize_metrics
from megatron_fleet.config.files import environment_name
from megatron_fleet.telemetry.episodes import (
    by_environment,
    episode_seconds,
    response_tokens,
    rollout_metrics,
    sampled_tokens,
    trajectories_of,
)
from megatron_fleet.telemetry.rewards import known_rewards

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from megatron_fleet.trainer.base import LossReport, OptimReport

MISMATCH_PREFIXES = ("policy/mismatch_", "policy/rollout_train_")
GAUGES = ("provision_s", "start_limit")
DISTRIBUTIONS = {
    "distribution/response_tokens": "Tokens of each episode but those of prompts, observations included.",
    "distribution/turns": "Turns of each episode.",
    "distribution/tool_calls": "Tool calls of each episode.",
    "distribution/episode_s": "Seconds of each episode, verification included.",
    "distribution/prompt_reward": "Mean known reward of each prompt.",
    "distribution/advantage": "Advantage of each trained sequence.",
    "distribution/staleness": "Weight versions since each span of tokens was sampled.",
}


def step_metrics(
    groups: Sequence[Group],
    batch: Batch,
    reports: Sequence[LossReport],
    optims: Sequence[OptimReport],
    seconds: Mapping[str, float],
    weight_version: int,
    pass_threshold: float,
    probe: float | None = None,
) -> dict[str, float]:
    """Compute all metrics of one training step.

    Args:
        groups: every collected group, including those left out of ``batch``.
        reports, optims: one per optimizer step, in order; empty if there was nothing to train on.
        seconds: duration of each phase; ``generate`` gives the token rate.
        weight_version: the version synced at the end of the step.
        pass_threshold: ``eval.pass_threshold``.
        probe: difference of log-probs between engines and trainer; ``None`` = not measured in this step.
    """
    return {
        **rollout_metrics(groups, pass_threshold),
        **batch_metrics(batch),
        **policy_metrics(reports, optims),
        **timing_metrics(groups, seconds),
        **provisioning_metrics(groups),
        "policy/weight_version": weight_version,
        **({} if probe is None else {"policy/probe_difference": probe}),
    }


def batch_metrics(batch: Batch) -> dict[str, float]:
    """Compute ``loss/`` and ``accounting/`` of a training batch."""
    out: dict[str, float] = {f"accounting/{fate}": batch.counts[fate] for fate in Fate}
    out["accounting/episodes"] = sum(batch.counts.values())
    out["accounting/trained_tokens"] = batch.trained_tokens
    if batch.data:
        lengths = np.array([np.count_nonzero(d.loss_mask) for d in batch.data])
        advantages = np.array(batch.advantages)
        trained = {origin.trajectory for origin in batch.origin}  # each may have several Data
        rewards = [batch.rewards[group][sample] for group, sample in sorted(trained)]
        out["loss/avg_final_rewards"] = float(np.mean(np.array(rewards, dtype=np.float64)))
        out["loss/avg_raw_advantages"] = float(np.average(advantages, weights=lengths))
        out["loss/avg_raw_advantages_abs"] = float(np.average(np.abs(advantages), weights=lengths))
        out["policy/response_length"] = float(lengths.sum() / len(trained))
    return out


def policy_metrics(reports: Sequence[LossReport], optims: Sequence[OptimReport]) -> dict[str, float]:
    """Compute ``policy/`` from the losses and optimizer steps of one batch."""
    if not reports:
        return {}
    sums: defaultdict[str, float] = defaultdict(float)
    for report in reports:
        for name, value in report.metrics.items():
            sums[name] += value
    for key in NORMALISED:
        if key in sums:
            sums[key] /= len(reports)  # each update's loss is already normalised over its own sequences
    out = finalize_metrics(sums)
    # Later updates of a batch move π away from μ by design; only the first one compares equal weights.
    first = finalize_metrics(reports[0].metrics)
    out |= {name: value for name, value in first.items() if name.startswith(MISMATCH_PREFIXES)}
    out |= _routing_metrics(reports[0].metrics)
    out["policy/final_loss"] = float(np.mean([r.loss for r in reports]))
    out["policy/policy_update_steps"] = sum(not o.skipped for o in optims)
    out["policy/skipped_steps"] = sum(o.skipped for o in optims)
    out["policy/skipped_steps_total"] = max((o.skipped_total for o in optims), default=0)
    out["policy/grad_norm_spikes"] = sum(o.spike for o in optims)
    tokens, padding = sum(r.tokens for r in reports), sum(r.padded_tokens for r in reports)
    if tokens:
        out["policy/packing_efficiency"] = tokens / (tokens + padding)
    norms = [o.grad_norm for o in optims if o.grad_norm is not None and math.isfinite(o.grad_norm)]
    if norms:
        out["policy/grad_norm"] = float(np.mean(norms))
    for name in sorted({name for o in optims for name in o.gradient}):
        out[f"policy/grad:{name}"] = float(np.mean([o.gradient[name] for o in optims if name in o.gradient]))
    if optims:
        out["policy/policy_lr"] = optims[-1].lr
    return out


def _routing_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """Compute routing metrics of the first update, which has the engine's weights; empty without routing replay."""
    if "routing_choices" not in sums:
        return {}
    choices, possible = sums["routing_choices"], sums["routing_possible"]
    out = {"policy/routing_replayed": choices / possible} if possible else {}
    return out | ({"policy/routing_disagreement": sums["routing_disagreed"] / choices} if choices else {})


def progress_metrics(step: int, prompts_per_step: int, tasks: int) -> dict[str, float]:
    """Compute ``trainer/`` metrics at the end of ``step`` (from 1), with ``tasks`` training tasks."""
    return {"trainer/global_step": step, "trainer/epoch": (step - 1) * prompts_per_step // tasks}


def data_metrics(status: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Compute ``data/`` from the sampler's ``status()``."""
    return {
        f"data/{name}/{environment_name(env)}": value for name, envs in status.items() for env, value in envs.items()
    }


def attempt_metrics(attempts: Mapping[str, int], family: Literal["accounting", "eval/all"]) -> dict[str, float]:
    """Compute counts of attempts (started, retried, aborted, …) from the collector's accounting."""
    again = ["unstarted"] if family == "eval/all" else ["stale", "unfinished", "replaced"]
    names = ["started", "retried", "aborted", *again]
    return {f"{family}/attempts_{name}": attempts[name] for name in names}


def async_metrics(staleness: np.ndarray, replayed: int, waits: Mapping[str, float]) -> dict[str, float]:
    """Compute ``async/``.

    Args:
        staleness: ``[N]``, weight versions since each span of tokens was sampled.
        replayed: episodes that were too old.
        waits: shares of time in which the trainer or the engines wait, and what is known of the stream of groups, by
            name.
    """
    out: dict[str, float] = {"async/staleness_violation_count": replayed}
    out |= {f"async/{name}": share for name, share in waits.items()}
    if len(staleness):
        out |= {f"async/staleness_{name}": float(getattr(staleness, name)()) for name in ("mean", "min", "max")}
        out["async/staleness_ratio"] = float((staleness > 0).mean())
    return out


def timing_metrics(groups: Sequence[Group], seconds: Mapping[str, float]) -> dict[str, float]:
    """Compute ``timing/`` and the rates derived from it."""
    out = {f"timing/{phase}": value for phase, value in seconds.items()}
    out |= episode_seconds(groups)
    if seconds.get("generate"):
        out["generate/tokens_per_second"] = sampled_tokens(trajectories_of(groups)) / seconds["generate"]
    return out


def provisioning_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Compute metrics from the numbers that workers record in each episode, over the episodes that have them."""
    out: dict[str, float] = {}
    for env, own in by_environment(groups).items():
        episodes = trajectories_of(own)
        out[f"environment/{env}/quarantined"] = sum(t.metrics.get("quarantined", 0.0) for t in episodes)
        out[f"environment/{env}/breaker_open"] = max(_values(episodes, "breaker_open"), default=0.0)
        out[f"environment/{env}/start_retries"] = sum(_values(episodes, "start_retries"))
        out[f"environment/{env}/attempts_retried"] = sum(_values(episodes, "attempts_retried"))
        for name in GAUGES:
            if values := _values(episodes, name):
                out[f"timing/{name}/{env}"] = sum(values) / len(values)
    if lags := _values(trajectories_of(groups), "loop_lag_p99"):
        out["timing/loop_lag_p99"] = max(lags)
    return out


def _values(episodes: Sequence[Trajectory], name: str) -> list[float]:
    return [t.metrics[name] for t in episodes if name in t.metrics]


def distributions(
    groups: Sequence[Group], batch: Batch, staleness: NDArray[np.int64]
) -> dict[str, NDArray[np.float64]]:
    """Return finite values by name, float64 ``[N]``, N ≥ 1; names without values are absent."""
    episodes = trajectories_of(groups)
    values = {
        "response_tokens": [response_tokens(t) for t in episodes],
        "turns": [t.metrics["turns"] for t in episodes if "turns" in t.metrics],
        "tool_calls": [t.metrics["tool_calls"] for t in episodes if "tool_calls" in t.metrics],
        "episode_s": [t.metrics["seconds"] for t in episodes if "seconds" in t.metrics],
        "prompt_reward": [rewards.mean() for rewards in known_rewards(groups)],
        "advantage": batch.advantages,
        "staleness": staleness,
    }
    arrays = {f"distribution/{name}": np.array(own, dtype=np.float64) for name, own in values.items()}
    return {name: finite for name, own in arrays.items() if len(finite := own[np.isfinite(own)])}

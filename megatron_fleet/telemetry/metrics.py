"""From what a step did to its named metrics. Names and formulas are in ``megatron_fleet.telemetry.registry``.

A mean without a single value is absent, never 0; counts are always there.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np

from megatron_fleet.agents.trajectory import Group, Outcome, Trajectory
from megatron_fleet.algorithms.advantages import is_known
from megatron_fleet.algorithms.batch import Batch, Fate
from megatron_fleet.algorithms.losses import NORMALISED, finalize_metrics
from megatron_fleet.telemetry.rewards import reward_metrics

if TYPE_CHECKING:
    from megatron_fleet.policy.base import LossReport, OptimReport

MISMATCH_PREFIXES = ("policy/mismatch_", "policy/rollout_train_")
INFRASTRUCTURE_OUTCOMES = (Outcome.ENV_FAILED, Outcome.ABORTED)


def step_metrics(
    groups: Sequence[Group],
    batch: Batch,
    reports: Sequence[LossReport],
    optims: Sequence[OptimReport],
    seconds: Mapping[str, float],
    weight_version: int,
    probe: float | None = None,
) -> dict[str, float]:
    """All metrics of one training step.

    Args:
        groups: every group collected, those left out of ``batch`` included.
        reports, optims: one per optimizer step, in order; empty when there was nothing to train on.
        seconds: duration of each phase; ``generate`` gives the token rate.
        weight_version: the version published at the end of the step.
        probe: how far engines were from the trainer then; ``None`` = nobody looked.
    """
    return {
        **rollout_metrics(groups),
        **batch_metrics(groups, batch),
        **policy_metrics(reports, optims),
        **timing_metrics(groups, seconds),
        "policy/weight_version": weight_version,
        **({} if probe is None else {"policy/probe_difference": probe}),
    }


def eval_metrics(sampled: Sequence[Group], greedy: Sequence[Group] = ()) -> dict[str, float]:
    """Metrics of one evaluation: ``sampled`` at the training temperature, ``greedy`` at temperature 0."""
    out: dict[str, float] = {}
    for env, groups in [("all", sampled), *_by_env(sampled).items()]:
        out |= _prefixed(f"eval/{env}/", {**reward_metrics(groups), **_eval_activity(_trajectories(groups))})
    for env, groups in [("all", greedy), *_by_env(greedy).items()]:
        rewards = reward_metrics(groups)
        names = ("avg_raw_reward", "pass_at_1")
        out |= _prefixed(f"eval/{env}/greedy_", {name: rewards[name] for name in names if name in rewards})
    if greedy:
        out |= _prefixed("eval/all/greedy_", _volume(_trajectories(greedy)))
    return out


def rollout_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """``reward/``, ``environment/`` and ``generate/``: what the episodes did, whatever training made of them."""
    trajectories = _trajectories(groups)
    activity = _activity(trajectories)
    for extreme in ("min_turns", "max_turns"):
        activity.pop(extreme, None)  # only per environment
    out = _prefixed("reward/", reward_metrics(groups))
    out |= _prefixed("environment/", activity)
    out["environment/total_episodes"] = len(trajectories)
    out["environment/total_env_init_failed"] = _count(trajectories, Outcome.ENV_FAILED)
    for env, own in _by_env(groups).items():
        episodes = _trajectories(own)
        out |= _prefixed(f"reward/{env}/", reward_metrics(own))
        out |= _prefixed(f"environment/{env}/", {**_activity(episodes), **_outcomes(episodes)})
        out[f"environment/{env}/num_episodes"] = len(episodes)
        out[f"environment/{env}/env_init_failed"] = _count(episodes, Outcome.ENV_FAILED)
    return out | _prefixed("generate/", _generation(trajectories))


def batch_metrics(groups: Sequence[Group], batch: Batch) -> dict[str, float]:
    """``loss/`` and ``accounting/``: what training took from the groups."""
    out: dict[str, float] = {f"accounting/{fate}": batch.counts[fate] for fate in Fate}
    out["accounting/episodes"] = sum(batch.counts.values())
    out["accounting/trained_tokens"] = batch.trained_tokens
    if batch.data:
        lengths = np.array([np.count_nonzero(d.mask) for d in batch.data])
        advantages = np.array(batch.advantages)
        rewards = [groups[o.group].trajectories[o.sample].reward for o in batch.origin]
        out["loss/avg_final_rewards"] = float(np.mean(np.array(rewards, dtype=np.float64)))
        out["loss/avg_raw_advantages"] = float(np.average(advantages, weights=lengths))
        out["loss/avg_raw_advantages_abs"] = float(np.average(np.abs(advantages), weights=lengths))
        out["policy/response_length"] = float(lengths.mean())
    return out


def policy_metrics(reports: Sequence[LossReport], optims: Sequence[OptimReport]) -> dict[str, float]:
    """``policy/``: the losses and optimizer steps of one batch."""
    if not reports:
        return {}
    sums: defaultdict[str, float] = defaultdict(float)
    for report in reports:
        for name, value in report.metrics.items():
            sums[name] += value
    for key in NORMALISED:
        if key in sums:
            sums[key] /= len(reports)  # each update's loss is already normalised over its own rows
    out = finalize_metrics(sums)
    # Later updates of a batch move π away from μ on purpose; only the first one compares the same weights.
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
    norms = [o.grad_norm for o in optims if math.isfinite(o.grad_norm)]
    if norms:
        out["policy/grad_norm"] = float(np.mean(norms))
    if optims:
        out["policy/policy_lr"] = optims[-1].lr
    return out


def _routing_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """Of the first update, which has the weights that the engine had; empty without routing replay."""
    if "routing_choices" not in sums:
        return {}
    choices, possible = sums["routing_choices"], sums["routing_possible"]
    out = {"policy/routing_replayed": choices / possible} if possible else {}
    return out | ({"policy/routing_disagreement": sums["routing_disagreed"] / choices} if choices else {})


def attempt_metrics(attempts: Mapping[str, int], family: Literal["accounting", "eval/all"]) -> dict[str, float]:
    """What became of the episodes that were not collected: the collector's ``started``, ``retried`` and ``aborted``."""
    return {f"{family}/attempts_{name}": attempts[name] for name in ("started", "retried", "aborted")}


def timing_metrics(groups: Sequence[Group], seconds: Mapping[str, float]) -> dict[str, float]:
    """``timing/`` and the rates that follow from it."""
    out = _prefixed("timing/", seconds)
    if seconds.get("generate"):
        out["generate/tokens_per_second"] = _generated(_trajectories(groups)) / seconds["generate"]
    return out


def _trajectories(groups: Iterable[Group]) -> list[Trajectory]:
    return [t for g in groups for t in g.trajectories]


def _by_env(groups: Iterable[Group]) -> dict[str, list[Group]]:
    """Groups per environment, in order of name; ``/`` would look like a level of its own."""
    envs: dict[str, list[Group]] = defaultdict(list)
    for group in groups:
        envs[group.env_key.replace("/", "_")].append(group)
    return dict(sorted(envs.items()))


def _prefixed(prefix: str, values: Mapping[str, float]) -> dict[str, float]:
    return {prefix + name: value for name, value in values.items()}


def _count(trajectories: Sequence[Trajectory], *outcomes: Outcome) -> int:
    return sum(t.outcome in outcomes for t in trajectories)


def _generated(trajectories: Sequence[Trajectory]) -> int:
    return sum(int(t.action_mask.sum()) for t in trajectories)


def _outcomes(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    return {f"outcome/{outcome}": _count(trajectories, outcome) for outcome in Outcome}


def _activity(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Turns, tool calls and their errors, without prefix."""
    if not trajectories:
        return {}

    def values(name: str) -> np.ndarray:
        return np.array([t.metrics.get(name, 0.0) for t in trajectories])

    turns, calls, errors = values("turns"), values("tool_calls"), values("tool_errors")
    out = {
        "avg_turns": float(turns.mean()),
        "min_turns": float(turns.min()),
        "max_turns": float(turns.max()),
        "avg_tool_calls": float(calls.mean()),
        "avg_tool_errors": float(errors.mean()),
        "total_tool_errors": float(errors.sum()),
        "no_action_rate": _count(trajectories, Outcome.NO_ACTION) / len(trajectories),
    }
    if turns.sum():
        out["tool_calls_per_turn"] = float(calls.sum() / turns.sum())
        out["parse_error_rate"] = float(values("parse_errors").sum() / turns.sum())
        out["no_action_turn_rate"] = float(values("no_action_turns").sum() / turns.sum())
    if calls.sum():
        out["tool_error_rate"] = float(errors.sum() / calls.sum())
        out["repeated_call_rate"] = float(values("repeated_calls").sum() / calls.sum())
    return out


def _failure_rates(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    if not trajectories:
        return {}
    return {
        "infrastructure_failure_rate": _count(trajectories, *INFRASTRUCTURE_OUTCOMES) / len(trajectories),
        "verifier_unknown_rate": _count(trajectories, Outcome.VERIFIER_FAILED) / len(trajectories),
        "unknown_reward_rate": sum(not is_known(t.reward) for t in trajectories) / len(trajectories),
    }


def _eval_activity(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    activity = _activity(trajectories)
    names = ("avg_turns", "avg_tool_calls", "tool_error_rate", "parse_error_rate", "no_action_rate")
    return {
        **{name: activity[name] for name in names if name in activity},
        **_failure_rates(trajectories),
        **_volume(trajectories),
    }


def _volume(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    return {
        "episodes": len(trajectories),
        "action_tokens": _generated(trajectories),
        **_outcomes(trajectories),
    }


def _generation(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Token counts, failures and weight versions, without prefix."""
    out = {
        "action_tokens": _generated(trajectories),
        "env_init_failures": _count(trajectories, Outcome.ENV_FAILED),
        "trajectory_timeouts": _count(trajectories, Outcome.TIMEOUT),
        **_outcomes(trajectories),
        **_failure_rates(trajectories),
    }
    lengths = np.array([_response_tokens(t) for t in trajectories])
    if len(lengths):
        out |= {
            "min_num_tokens": float(lengths.min()),
            "max_num_tokens": float(lengths.max()),
            "avg_num_tokens": float(lengths.mean()),
            "std_num_tokens": float(lengths.std()),
        }
    for name, wanted in (("non_zero", True), ("zero", False)):
        own = [
            n for n, t in zip(lengths, trajectories, strict=True) if is_known(t.reward) and (t.reward != 0) == wanted
        ]
        if own:
            out[f"avg_tokens_{name}_rewards"] = float(np.mean(own))
    versions = [s.weight_version for t in trajectories for s in t.spans if s.kind == "action"]
    if versions:
        out |= {"weight_version_min": min(versions), "weight_version_max": max(versions)}
    return out


def _response_tokens(trajectory: Trajectory) -> int:
    """Tokens after the first prompt, observations included."""
    spans = trajectory.spans
    start = spans[0].end if spans and spans[0].kind == "prompt" else 0
    return len(trajectory.token_ids) - start

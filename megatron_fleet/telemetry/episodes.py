"""Episode metrics: rewards, activity, failures, tokens. Formulas: ``telemetry/registry.py``.

A mean over no values is absent, never 0; counts are always present.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from megatron_fleet.agents.trajectory import CAUSES, Cause, Group, Outcome, Trajectory, will_recur
from megatron_fleet.algorithms.advantages import is_known
from megatron_fleet.config.files import environment_name
from megatron_fleet.telemetry.rewards import is_solved, reward_metrics

if TYPE_CHECKING:
    from numpy.typing import NDArray

INFRASTRUCTURE_OUTCOMES = tuple(
    o for o, cause in CAUSES.items() if cause in (Cause.ENVIRONMENT, Cause.REQUEST, Cause.RUN)
)
NGRAM = 20
"""Tokens; shorter n-grams repeat in every legitimate tool call, longer ones miss a repeated sentence."""
_MIX = np.uint64(0x9E3779B97F4A7C15)


def rollout_metrics(groups: Sequence[Group], pass_threshold: float) -> dict[str, float]:
    """Compute ``reward/``, ``environment/`` and ``generate/`` from all episodes, whether trained on or not."""
    episodes = trajectories_of(groups)
    activity = _activity(episodes, pass_threshold)
    for extreme in ("min_turns", "max_turns"):
        activity.pop(extreme, None)  # only per environment
    out = _prefixed("reward/", reward_metrics(groups, pass_threshold))
    out |= _prefixed("environment/", activity)
    out["environment/total_episodes"] = len(episodes)
    out["environment/total_env_init_failed"] = _count(episodes, Outcome.ENV_FAILED)
    for env, own in by_environment(groups).items():
        out |= _prefixed(f"reward/{env}/", reward_metrics(own, pass_threshold))
        out |= _prefixed(f"environment/{env}/", _environment(trajectories_of(own), pass_threshold))
    return out | _prefixed("generate/", _generation(episodes))


def eval_metrics(sampled: Sequence[Group], greedy: Sequence[Group], pass_threshold: float) -> dict[str, float]:
    """Compute the metrics of one evaluation: ``sampled`` at the training temperature, ``greedy`` at temperature 0."""
    out: dict[str, float] = {}
    for env, groups in [("all", sampled), *by_environment(sampled).items()]:
        episodes = trajectories_of(groups)
        numbers = {**reward_metrics(groups, pass_threshold), **_activity(episodes, pass_threshold)}
        numbers |= {**_failures(episodes), **_lengths(episodes), **_coverage(groups), **_volume(episodes)}
        out |= _prefixed(f"eval/{env}/", numbers)
    for env, groups in [("all", greedy), *by_environment(greedy).items()]:
        rewards = reward_metrics(groups, pass_threshold)
        names = ("avg_raw_reward", "pass_at_1")
        out |= _prefixed(f"eval/{env}/greedy_", {name: rewards[name] for name in names if name in rewards})
    if greedy:
        out |= _prefixed("eval/all/greedy_", {**_coverage(greedy), **_volume(trajectories_of(greedy))})
    return out


def episode_seconds(groups: Sequence[Group]) -> dict[str, float]:
    """Compute ``timing/`` of the episodes of a step."""
    out: dict[str, float] = {}
    for env, own in [("all", groups), *by_environment(groups).items()]:
        seconds = _values(trajectories_of(own), "seconds")
        if len(seconds):
            out[f"timing/episode_s/{env}"] = float(seconds.mean())
            out[f"timing/min_episode_s/{env}"] = float(seconds.min())
            out[f"timing/max_episode_s/{env}"] = float(seconds.max())
    return out


def trajectories_of(groups: Iterable[Group]) -> list[Trajectory]:
    return [t for g in groups for t in g.trajectories]


def by_environment(groups: Iterable[Group]) -> dict[str, list[Group]]:
    """Map environment name in metrics → its groups, sorted by name."""
    envs: dict[str, list[Group]] = defaultdict(list)
    for group in groups:
        envs[environment_name(group.env_key)].append(group)
    return dict(sorted(envs.items()))


def sampled_tokens(trajectories: Iterable[Trajectory]) -> int:
    """Count the tokens that the policy sampled; for an endpoint, which returns no ids, the number it reported."""
    return sum(int(t.action_mask.sum()) or int(t.metrics.get("action_tokens", 0)) for t in trajectories)


def why_nothing_is_known(trajectories: Iterable[Trajectory]) -> str | None:
    """Return the most common reason if no reward is known; ``None`` if one is."""
    trajectories = list(trajectories)
    if any(is_known(t.reward) for t in trajectories):
        return None
    reasons = Counter(f"{t.outcome}: {t.reward_reason}" for t in trajectories)
    return max(reasons, key=reasons.__getitem__, default=None)


def why_nothing_can_be_known(trajectories: Iterable[Trajectory], max_context: int) -> str | None:
    """Return a sentence if no reward is known and another attempt at each episode would end in the same way.

    ``max_context``: ``rollout.max_context``.
    """
    trajectories = list(trajectories)
    reason = why_nothing_is_known(trajectories)
    if reason is None or not all(will_recur(t.outcome) for t in trajectories):
        return None
    if any(t.outcome is not Outcome.PROMPT_TOO_LONG for t in trajectories):
        return f"no episode can be played, most often {reason.rstrip('.')}; correct that, then start again."
    lengths = [int(t.metrics["first_prompt_tokens"]) for t in trajectories if "first_prompt_tokens" in t.metrics]
    shortest = f"the shortest has {min(lengths)} tokens" if lengths else trajectories[0].reward_reason
    return (
        f"every first prompt is longer than rollout.max_context={max_context} ({shortest}); raise it, or leave out "
        f"these tasks."
    )


def _prefixed(prefix: str, values: Mapping[str, float]) -> dict[str, float]:
    return {prefix + name: value for name, value in values.items()}


def _count(trajectories: Sequence[Trajectory], *outcomes: Outcome) -> int:
    return sum(t.outcome in outcomes for t in trajectories)


def _outcomes(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    return {f"outcome/{outcome}": _count(trajectories, outcome) for outcome in Outcome}


def _environment(trajectories: Sequence[Trajectory], pass_threshold: float) -> dict[str, float]:
    """Compute all metrics of one environment's episodes, without prefix."""
    return {
        **_activity(trajectories, pass_threshold),
        **_failures(trajectories),
        **_outcomes(trajectories),
        "num_episodes": len(trajectories),
        "env_init_failed": _count(trajectories, Outcome.ENV_FAILED),
        "trajectory_timeouts": _count(trajectories, Outcome.TIMEOUT),
    }


def _activity(trajectories: Sequence[Trajectory], pass_threshold: float) -> dict[str, float]:
    """Compute metrics of turns, tool calls, tool errors and policy habits, without prefix."""
    if not trajectories:
        return {}
    turns, calls, errors = (_values(trajectories, name) for name in ("turns", "tool_calls", "tool_errors"))
    repeated = _values(trajectories, "repeated_calls")
    out = {
        "avg_turns": float(turns.mean()),
        "min_turns": float(turns.min()),
        "max_turns": float(turns.max()),
        "avg_tool_calls": float(calls.mean()),
        "avg_tool_errors": float(errors.mean()),
        "total_tool_errors": float(errors.sum()),
        "avg_local_tool_calls": float(_values(trajectories, "local_tool_calls").mean()),
        "avg_truncated_outputs": float(_values(trajectories, "truncated_outputs").mean()),
        "avg_images": float(_values(trajectories, "images").mean()),
        "avg_image_tokens": float(_values(trajectories, "image_tokens").mean()),
        "total_images_unseen": float(_values(trajectories, "images_unseen").sum()),
        "total_turns_past_deadline": float(_values(trajectories, "turns_past_deadline").sum()),
        "no_action_rate": _count(trajectories, Outcome.NO_ACTION) / len(trajectories),
        "repeating_rate": float((repeated > 0).mean()),
        "max_repeat": float(_values(trajectories, "max_repeat").max()),
    }
    if turns.sum():
        out["tool_calls_per_turn"] = float(calls.sum() / turns.sum())
        out["parse_error_rate"] = float(_values(trajectories, "parse_errors").sum() / turns.sum())
        out["no_action_turn_rate"] = float(_values(trajectories, "no_action_turns").sum() / turns.sum())
    if calls.sum():
        out["tool_error_rate"] = float(errors.sum() / calls.sum())
        out["repeated_call_rate"] = float(repeated.sum() / calls.sum())
    claimed = [t.reward for t in trajectories if t.outcome is Outcome.COMPLETED and is_known(t.reward)]
    if claimed:
        unsolved = sum(not is_solved(reward, pass_threshold) for reward in claimed)
        out["false_completion_rate"] = unsolved / len(claimed)
    if said := sampled_tokens(trajectories):
        out["think_token_share"] = float(_values(trajectories, "think_tokens").sum() / said)
    return out


def _values(trajectories: Sequence[Trajectory], name: str) -> NDArray[np.float64]:
    """Return one number per episode, float64 ``[E]``; 0 where an episode has no such count."""
    return np.array([t.metrics.get(name, 0.0) for t in trajectories], dtype=np.float64)


def _failures(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    if not trajectories:
        return {}
    return {
        "infrastructure_failure_rate": _count(trajectories, *INFRASTRUCTURE_OUTCOMES) / len(trajectories),
        "verifier_unknown_rate": _count(trajectories, Outcome.VERIFIER_FAILED) / len(trajectories),
        "unknown_reward_rate": sum(not is_known(t.reward) for t in trajectories) / len(trajectories),
    }


def _coverage(groups: Sequence[Group]) -> dict[str, float]:
    scored = sum(any(is_known(t.reward) for t in g.trajectories) for g in groups)
    return {"tasks": len(groups), "tasks_scored": scored}


def _volume(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    return {
        "episodes": len(trajectories),
        "action_tokens": sampled_tokens(trajectories),
        **_outcomes(trajectories),
    }


def _generation(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Compute token counts, failures and weight versions of a step, without prefix."""
    out = {
        "action_tokens": sampled_tokens(trajectories),
        "env_init_failures": _count(trajectories, Outcome.ENV_FAILED),
        "trajectory_timeouts": _count(trajectories, Outcome.TIMEOUT),
        **_outcomes(trajectories),
        **_failures(trajectories),
        **_lengths(trajectories),
    }
    versions = [s.weight_version for t in trajectories for s in t.spans if s.kind == "action"]
    if versions:
        out |= {"weight_version_min": min(versions), "weight_version_max": max(versions)}
    return out


def _lengths(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Compute response lengths, by outcome and by reward, and the rate of repeated n-grams."""
    if not any(len(t.token_ids) for t in trajectories):
        return {}
    lengths = np.array([response_tokens(t) for t in trajectories])
    out = {
        "min_num_tokens": float(lengths.min()),
        "max_num_tokens": float(lengths.max()),
        "avg_num_tokens": float(lengths.mean()),
        "std_num_tokens": float(lengths.std()),
    }
    kinds: dict[str, list[int]] = defaultdict(list)
    for length, t in zip(lengths.tolist(), trajectories, strict=True):
        kinds[f"avg_tokens/{t.outcome}"].append(length)
        if is_known(t.reward):
            kinds["avg_tokens_zero_rewards" if t.reward == 0 else "avg_tokens_non_zero_rewards"].append(length)
    out |= {name: float(np.mean(own)) for name, own in kinds.items()}
    repeats = np.array([repeated_ngrams(t.token_ids[t.action_mask]) for t in trajectories])
    if repeats[:, 1].sum():
        out["repeated_ngram_rate"] = float(repeats[:, 0].sum() / repeats[:, 1].sum())
    return out


def response_tokens(trajectory: Trajectory) -> int:
    """Count all tokens except those of prompts; observations are included."""
    return sum(span.end - span.start for span in trajectory.spans if span.kind != "prompt")


def repeated_ngrams(token_ids: NDArray[np.int32]) -> tuple[int, int]:
    """Count the ``NGRAM``-grams of ``token_ids`` (int32 ``[A]``): those that occurred before, and all of them.

    They are compared by a 64-bit polynomial hash; among 50,000 of them a collision occurs once in 10^10 episodes.
    """
    total = len(token_ids) - NGRAM + 1
    if total <= 0:
        return 0, 0
    ids = token_ids.astype(np.uint64) + np.uint64(1)
    hashes = np.zeros(total, np.uint64)
    for offset in range(NGRAM):  # intended wrap-around: arithmetic modulo 2^64
        hashes = hashes * _MIX + ids[offset : offset + total]
        hashes ^= hashes >> np.uint64(29)
    return total - len(np.unique(hashes)), total

"""Every metric name this package emits, with its formula.

``python -m megatron_fleet.telemetry.registry`` prints the docs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

WILDCARDS = {
    "{env}": ("[^/]+", "environment key, `/` written as `_`; `all` under `eval/` = all environments together"),
    "{k}": ("[0-9]+", "1, 2, 4 … up to the samples per prompt, and that number itself"),
    "{n}": ("[0-9]+", "samples per prompt"),
    "{outcome}": ("[a-z_]+", "why an episode ended, see `Outcome`"),
    "{phase}": (
        "[a-z_]+",
        "a phase of the loop: `step`, `generate`, `train`, `sync_weights`, `eval`, `save_checkpoints` …; when engines "
        "share the trainer's devices also `offload`, `onload`, `engines_sleep`, `engines_wake`",
    ),
    "{owner}": ("[a-z]+", "who holds memory: see megatron_fleet/ledger.py"),
}


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric name, possibly with wildcards, and the sentence that defines it."""

    pattern: str
    formula: str

    def matches(self, name: str) -> bool:
        regex = re.escape(self.pattern)
        for wildcard, (expression, _) in WILDCARDS.items():
            regex = regex.replace(re.escape(wildcard), expression)
        return re.fullmatch(regex, name) is not None


def _family(prefixes: tuple[str, ...], rows: dict[str, str]) -> tuple[Metric, ...]:
    return tuple(Metric(prefix + name, formula) for prefix in prefixes for name, formula in rows.items())


_REWARD = {
    "avg_raw_reward": "Mean reward over episodes with a known reward; with 0/1 rewards this is pass@1.",
    "mean_clipped_reward": "Mean of max(reward, 0) over episodes with a known reward.",
    "mean_positive_reward": "Mean reward over the episodes whose reward is above 0; absent when there is none.",
    "avg_pass_at_{n}": "Share of prompts (with a known reward) that have any reward above 0.",
    "pass_at_{k}": "Mean over prompts with at least k known rewards of 1 − C(m−c, k)/C(m, k), m known, c above 0 "
    "(unbiased pass@k); equals avg_pass_at_{n} for k = n when nothing is unknown.",
    "variance_per_prompt": "Mean over prompts with at least 2 known rewards of their population variance.",
    "signal_ratio": "Share of prompts with at least 2 known rewards whose known rewards are not all equal.",
}

_ACTIVITY = {
    "avg_turns": "Mean turns per episode.",
    "avg_tool_calls": "Mean tool calls per episode.",
    "tool_error_rate": "Tool errors divided by tool calls, over all episodes; absent without tool calls.",
    "parse_error_rate": "Turns with a tool call that could not be parsed, divided by turns.",
    "no_action_rate": "Share of episodes that ended as `no_action`.",
}

_MORE_ACTIVITY = {
    "tool_calls_per_turn": "Tool calls divided by turns, over all episodes.",
    "avg_tool_errors": "Mean tool errors per episode.",
    "total_tool_errors": "Sum of tool errors.",
    "repeated_call_rate": "Tool calls that equal an earlier one of the same episode, divided by tool calls.",
    "no_action_turn_rate": "Turns with neither a tool call nor a final answer, divided by turns.",
}

_FAILURES = {
    "infrastructure_failure_rate": "Share of episodes that ended as `env_failed` or `aborted`.",
    "verifier_unknown_rate": "Share of episodes that ended as `verifier_failed`.",
    "unknown_reward_rate": "Share of episodes whose reward is unknown, for whatever reason.",
    "outcome/{outcome}": "Number of episodes that ended this way.",
}

_ENVIRONMENT = (
    *_family(("environment/", "environment/{env}/"), _ACTIVITY | _MORE_ACTIVITY),
    Metric("environment/total_episodes", "Number of episodes."),
    Metric("environment/total_env_init_failed", "Number of episodes that ended as `env_failed`."),
    Metric("environment/{env}/min_turns", "Fewest turns of an episode."),
    Metric("environment/{env}/max_turns", "Most turns of an episode."),
    Metric("environment/{env}/num_episodes", "Number of episodes."),
    Metric("environment/{env}/env_init_failed", "Number of episodes that ended as `env_failed`."),
    Metric("environment/{env}/outcome/{outcome}", "Number of episodes that ended this way."),
)

_GENERATE = {
    "action_tokens": "Tokens the policy sampled.",
    "min_num_tokens": "Fewest tokens after the first prompt, observations included.",
    "max_num_tokens": "Most tokens after the first prompt, observations included.",
    "avg_num_tokens": "Mean tokens after the first prompt, observations included.",
    "std_num_tokens": "Population standard deviation of the tokens after the first prompt.",
    "avg_tokens_non_zero_rewards": "avg_num_tokens over episodes with a known reward other than 0.",
    "avg_tokens_zero_rewards": "avg_num_tokens over episodes with reward 0.",
    "env_init_failures": "Number of episodes that ended as `env_failed`.",
    "trajectory_timeouts": "Number of episodes that ended as `timeout`.",
    "tokens_per_second": "action_tokens divided by timing/generate.",
    "weight_version_min": "Oldest weight version that sampled a token of this step.",
    "weight_version_max": "Newest weight version that sampled a token of this step.",
    **_FAILURES,
}

_ATTEMPTS = {
    "attempts_started": "Episodes handed to a worker: those collected, those retried and those aborted.",
    "attempts_retried": "Episodes that ended with an unknown reward and were played again from the start.",
    "attempts_aborted": "Episodes that went down with an engine or a worker and were issued again.",
}

_ACCOUNTING = {
    **_ATTEMPTS,
    "episodes": "Episodes collected for this step; the sum of the five fates below.",
    "trained": "Episodes that became training rows.",
    "zero_signal": "Episodes left out because all known rewards of their group are equal.",
    "unknown": "Episodes left out because their reward is unknown.",
    "too_few_known": "Episodes left out because no other reward of their group is known.",
    "no_tokens": "Episodes whose reward counted for the group, but in which the policy sampled no token.",
    "trained_tokens": "Tokens with a gradient.",
}

_LOSS = {
    "avg_final_rewards": "Mean reward of the training rows.",
    "avg_raw_advantages": "Mean advantage over trained tokens, before the normaliser.",
    "avg_raw_advantages_abs": "Mean absolute advantage over trained tokens, before the normaliser.",
}

_POLICY = {
    "final_loss": "The loss that was differentiated: policy_loss + kl_loss + entropy_loss, mean over the updates.",
    "policy_loss": "The policy term of the loss, correction included, mean over the updates of the batch.",
    "kl_loss": "algorithm.kl.coef × Σ normaliser × KL estimate, mean over the updates of the batch.",
    "entropy_loss": "−algorithm.entropy_coef × Σ normaliser × entropy, mean over the updates of the batch.",
    "policy_kl": "Mean over trained tokens of the estimate of KL(π‖π_ref) that algorithm.kl.estimator names.",
    "policy_entropy": "Mean entropy of π at trained tokens, in nats.",
    "nll": "Mean −log π(token) over trained tokens (supervised warm start only).",
    "ratio_mean": "Mean of the loss's ratio over trained tokens: π/π_old (exactly 1 with one update per batch), its "
    "geometric mean over the sequence (gspo, gmpo), or π/μ (importance_weighted).",
    "ppo_clip_ratio": "Share of trained tokens that the bounds of the ratio changed: the sum of those below.",
    "ppo_clip_ratio_low": "Share of trained tokens with ratio < 1 − clip_low: gradient removed if the advantage is "
    "negative and not counted otherwise (ppo_clip, gspo, gmpo), weight raised (cispo), left out (importance_weighted).",
    "ppo_clip_ratio_high": "Share of trained tokens with ratio > 1 + clip_high: gradient removed if the advantage is "
    "positive and not counted otherwise (ppo_clip, gspo, gmpo), weight cut (cispo), left out (importance_weighted).",
    "ppo_clip_ratio_dual": "Share of trained tokens with negative advantage and ratio > dual_clip (ppo_clip).",
    "correction_weight_mean": "Mean over trained tokens of the correction's weight c; 1 when engine and trainer agree.",
    "correction_tokens": "Share of trained tokens whose weight the correction truncated or set to 0.",
    "correction_sequences": "Share of sequences with trained tokens in which the correction touched one.",
    "correction_ess": "Effective sample size (Σc)² / Σc² divided by the trained tokens: 1 when all weigh the same.",
    "mismatch_kl": "KL(μ‖π), engine against trainer: mean of ρ − 1 − log ρ, ρ = π/μ, first update only (k3, ≥ 0).",
    "mismatch_kl_k1": "KL(μ‖π): mean of log μ − log π, first update only (k1).",
    "probe_difference": "Mean |log π_engine − log π_trainer| over the probe's tokens, worst engine; only when probed.",
    "rollout_train_prob_diff_mean": "Mean of μ/π over trained tokens, first update only: a ratio, 1 when they agree.",
    "rollout_train_prob_diff_std": "Population standard deviation of μ/π over trained tokens, first update only.",
    "routing_replayed": "Share of tokens × expert layers whose experts were replayed; first update, and only with "
    "rollout.engine.routing_replay.",
    "routing_disagreement": "Share of the replayed experts that the trainer's router would not have taken; as above.",
    "packing_efficiency": "Tokens of the sequences divided by the width of the rows they were packed into.",
    "response_length": "Mean trained tokens per training row.",
    "grad_norm": "Gradient norm before clipping, mean over the updates with a finite one.",
    "policy_lr": "Learning rate of the last update.",
    "policy_update_steps": "Optimizer steps taken.",
    "skipped_steps": "Optimizer steps skipped because loss or gradient was not finite.",
    "skipped_steps_total": "The same over the run, resumed parts included.",
    "grad_norm_spikes": "Optimizer steps whose gradient norm was above policy.safety.spike_factor × the median of the "
    "last 32; they were taken.",
    "weight_version": "Weight version published at the end of the step.",
}

_EVAL = {
    **_REWARD,
    **_ACTIVITY,
    **_FAILURES,
    "episodes": "Number of episodes at the training temperature.",
    "action_tokens": "Tokens the policy sampled in them.",
    "greedy_avg_raw_reward": "avg_raw_reward of the greedy episodes.",
    "greedy_pass_at_1": "pass_at_1 of the greedy episodes.",
}

METRICS: tuple[Metric, ...] = (
    *_family(("reward/", "reward/{env}/"), _REWARD),
    *_ENVIRONMENT,
    *_family(("generate/",), _GENERATE),
    *_family(("accounting/",), _ACCOUNTING),
    *_family(("loss/",), _LOSS),
    *_family(("policy/",), _POLICY),
    Metric("timing/{phase}", "Wall-clock seconds of this phase."),
    Metric(
        "memory/{phase}/{owner}",
        "GiB that the owner holds when `train`, `publish` or `roll` begins (temporary: at most during it), on the rank "
        "that holds most.",
    ),
    *_family(("eval/{env}/",), _EVAL),
    *_family(("eval/all/",), _ATTEMPTS),
    Metric("eval/all/greedy_episodes", "Number of greedy episodes."),
    Metric("eval/all/greedy_action_tokens", "Tokens the policy sampled in the greedy episodes."),
    Metric("eval/all/greedy_outcome/{outcome}", "Number of greedy episodes that ended this way."),
)


def find(name: str) -> Metric | None:
    """The metric that ``name`` is an instance of."""
    return next((m for m in METRICS if m.matches(name)), None)


def render() -> str:
    """The registry as a Markdown page."""
    lines = [
        "# Metrics",
        "",
        "Generated by `python -m megatron_fleet.telemetry.registry > docs/metrics.md`; do not edit.",
        "",
        "Unknown rewards enter no reward metric. A mean without a single value is absent, never 0.",
        "`mean_positive_reward` averages over positive rewards only, overall as well as per environment; the mean of",
        "max(reward, 0), which once had the same name, is `mean_clipped_reward`.",
        "",
        *(f"* `{wildcard}`: {meaning}" for wildcard, (_, meaning) in WILDCARDS.items()),
    ]
    section = ""
    for metric in METRICS:
        if metric.pattern.split("/")[0] != section:
            section = metric.pattern.split("/")[0]
            lines += ["", f"## {section}", "", "| name | formula |", "|---|---|"]
        lines.append(f"| `{metric.pattern}` | {metric.formula} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(render(), end="")

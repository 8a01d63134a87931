"""Metric names of Fleet's earlier dashboards and their current equivalents. Part of docs/reference/metrics.md."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FormerName:
    """One former metric name.

    Attributes:
        name: with the wildcards of the registry.
        now: registry pattern of the equivalent metric; ``None``: there is none, and ``note`` says why.
        note: differences, if any.
    """

    name: str
    now: str | None
    note: str = ""


def _same(prefix: str, *names: str) -> Iterator[FormerName]:
    return (FormerName(prefix + name, prefix + name) for name in names)


_SPREAD = ("variance_per_prompt", "signal_ratio", "mean_positive_reward")
_ACTIVITY = ("avg_turns", "avg_tool_calls", "tool_calls_per_turn")
_ERRORS = ("avg_tool_errors", "total_tool_errors", "tool_error_rate")
_LOST = "After the last retry; environments that were lost on the way count too."
_MARKED = (
    "Results that the environment marks as errors; those that merely begin with `Error:` or have an empty `error` "
    "were counted too, those of the last turn and of unknown tools were not."
)
_ONE_ENVIRONMENT = "The former split was by env_class, so of all environments together."
_GRADIENT = {
    "snr": "The mean over elements of mean over deviation was above 0 for noise alone and depended on the number of "
    "micro-steps; of rank 0's shard, as the next three.",
    "megabytes_edited": "3.6 bits for each gradient above 5 % of its weight: a comparison of unlike units.",
    "update_diversity": "The histogram itself was logged.",
    "effective_rank": "Of an approximation of rank 64.",
}
_TINKER = "Of the hosted backend, which is not part of this package."

_SOLVED = "Any reward above 0 counted as solved; now one of at least eval.pass_threshold."
_UNBIASED = f"k = n; unbiased when rewards are unknown. {_SOLVED}"

FORMER: tuple[FormerName, ...] = (
    FormerName("reward/avg_pass_at_1", "reward/avg_pass_at_1", _SOLVED),
    FormerName("reward/avg_pass_at_{n}", "reward/avg_pass_at_{n}", _SOLVED),
    *_same("reward/", "avg_raw_reward"),
    FormerName(
        "reward/mean_positive_reward", "reward/mean_clipped_reward", "It was the mean of max(reward, 0) over all."
    ),
    FormerName("reward/{env}/pass_at_{n}", "reward/{env}/pass_at_{k}", _UNBIASED),
    *_same("reward/{env}/", *_SPREAD),
    FormerName("eval/{env}/pass_at_{n}", "eval/{env}/pass_at_{k}", _UNBIASED),
    *_same("eval/{env}/", *_SPREAD),
    FormerName("eval/all/pass_at_{n}", "eval/{env}/pass_at_{k}", f"{{env}} = all, {_UNBIASED}"),
    *(FormerName(f"eval/all/{name}", f"eval/{{env}}/{name}", "{env} = all.") for name in _SPREAD),
    *_same("environment/{env}/", *_ACTIVITY, "min_turns", "max_turns", "num_episodes"),
    FormerName("environment/{env}/env_init_failed", "environment/{env}/env_init_failed", _LOST),
    *_same("environment/", *_ACTIVITY, "total_episodes"),
    FormerName("environment/total_env_init_failed", "environment/total_env_init_failed", _LOST),
    *(
        FormerName(f"environment/{where}{name}", f"environment/{where}{name}", _MARKED)
        for where in ("{env}/", "")
        for name in _ERRORS
    ),
    FormerName("generate/env_init_failures", "generate/env_init_failures", _LOST),
    *_same("generate/", "trajectory_timeouts"),
    FormerName("environment/fleet_task/env_init_failures", "environment/{env}/env_init_failed", _ONE_ENVIRONMENT),
    FormerName("environment/fleet_task/trajectory_timeouts", "environment/{env}/trajectory_timeouts", _ONE_ENVIRONMENT),
    FormerName("generate/batch_timeouts", None, "A step has no deadline of its own: every wait in it has one."),
    FormerName(
        "environment/{env}/batch_timeouts", None, "As above; an evaluation's budget: eval/{env}/outcome/aborted."
    ),
    *_same("generate/", "min_num_tokens", "max_num_tokens", "avg_num_tokens", "std_num_tokens"),
    *_same("generate/", "avg_tokens_non_zero_rewards", "avg_tokens_zero_rewards"),
    *_same("trainer/", "epoch", "global_step"),
    FormerName("loss/avg_final_rewards", "loss/avg_final_rewards", "Of trained episodes; all were counted."),
    *(
        FormerName(f"loss/{name}", f"loss/{name}", "Of trained tokens; observations were counted too.")
        for name in ("avg_raw_advantages", "avg_raw_advantages_abs")
    ),
    FormerName("loss/avg_kl", None, "The KL term is part of the loss, never of the reward: policy/policy_kl."),
    *_same("policy/", "final_loss", "policy_loss", "ppo_clip_ratio", "policy_entropy", "response_length"),
    *_same("policy/", "policy_lr", "policy_kl", "grad_norm", "policy_update_steps"),
    FormerName("policy/raw_grad_norm", "policy/grad_norm"),
    *_same("policy/", "rollout_train_prob_diff_mean", "rollout_train_prob_diff_std"),
    *(
        FormerName(f"timing/{name}", "timing/{phase}")
        for name in ("step", "generate", "convert_to_training_input", "compute_advantages_and_returns", "policy_train")
    ),
    *(FormerName(f"timing/{name}", "timing/{phase}") for name in ("save_checkpoints", "sync_weights", "eval")),
    FormerName("timing/train_critic_and_policy", "timing/{phase}", "timing/policy_train: there is no critic."),
    FormerName("timing/fwd_logprobs_values_reward", "timing/{phase}", "Part of timing/policy_train."),
    FormerName("timing/cleanup_old_checkpoints", "timing/{phase}", "Part of timing/save_checkpoints."),
    FormerName("timing/postprocess_generator_output", None, "There is nothing to do: trajectories arrive finished."),
    *(FormerName(f"async/staleness_{name}", f"async/staleness_{name}") for name in ("mean", "max", "min", "ratio")),
    FormerName("async/staleness_violation_count", "async/staleness_violation_count"),
    *(FormerName(f"policy/grad:{name}", f"policy/grad:{name}", note) for name, note in _GRADIENT.items()),
    FormerName("advantage/mean", "loss/avg_raw_advantages", "Over trained tokens."),
    FormerName("advantage/std", None, "loss/avg_raw_advantages_abs tells how far advantages are from 0."),
    FormerName("rollouts/valid", "accounting/trained"),
    FormerName("rollouts/total", "accounting/episodes"),
    FormerName("rollouts/invalid", "accounting/unknown"),
    FormerName("rollouts/truncated_overlong", "generate/outcome/{outcome}", "context_overflow, generation_truncated."),
    FormerName("rollout/{env}/turns", "environment/{env}/avg_turns"),
    FormerName("rollout/{env}/tool_calls", "environment/{env}/avg_tool_calls"),
    FormerName("rollout/{env}/tool_errors", "environment/{env}/avg_tool_errors"),
    FormerName("rollout/{env}/tool_error_rate", "environment/{env}/tool_error_rate"),
    FormerName("rollout/{env}/duration", "timing/episode_s/{env}"),
    FormerName("rollout/avg_duration", "timing/episode_s/{env}", "{env} = all."),
    *(FormerName(f"rollout/{n}_duration", f"timing/{n}_episode_s/{{env}}", "{env} = all.") for n in ("max", "min")),
    FormerName("throughput/tokens_total", "generate/action_tokens"),
    FormerName("throughput/tokens_per_sec_gen", "generate/tokens_per_second"),
    FormerName("throughput/tokens_per_sec_effective", None, "accounting/trained_tokens over timing/step."),
    FormerName("time/rollout", "timing/{phase}", "timing/generate."),
    FormerName("time/train", "timing/{phase}", "timing/policy_train."),
    FormerName("time/total", "timing/{phase}", "timing/step."),
    *(FormerName(f"time/{name}", None, _TINKER) for name in ("gen_total", "gen_mean", "gen_pct")),
    *(FormerName(f"time/{name}", None, _TINKER) for name in ("step_total", "step_mean", "step_pct")),
    FormerName("eval/num_samples", "eval/{env}/episodes", "{env} = all."),
)


def render() -> list[str]:
    """Return the lines of the Markdown table."""
    lines = ["| former name | now | what is different |", "|---|---|---|"]
    for former in FORMER:
        now = "" if former.now is None else "the same" if former.now == former.name else f"`{former.now}`"
        lines.append(f"| `{former.name}` | {now} | {former.note} |")
    return lines

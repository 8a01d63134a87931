"""Registry of every metric name this package emits, with its formula.

``python -m megatron_fleet.telemetry.registry`` prints the docs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from megatron_fleet.telemetry.metrics import DISTRIBUTIONS

WILDCARDS = {
    "{env}": ("[^/]+", "environment key, `/` written as `_`; `all` under `eval/` = all environments together"),
    "{k}": ("[0-9]+", "1, 2, 4 … up to the samples per prompt, and that number itself"),
    "{n}": ("(?!1$)[0-9]+", "samples per prompt, when it is not 1"),
    "{outcome}": ("[a-z_]+", "why an episode ended, see `Outcome`"),
    "{phase}": (
        "[a-z_]+",
        "a phase of the loop: `step`, `generate`, `compute_advantages_and_returns`, `convert_to_training_input` (the "
        "plan of packing), `policy_train` (all passes and optimizer steps), `sync_weights`, `save_checkpoints` (what "
        "training waits for the copy of the state, before the weights go out), `eval` (not part of `step`), and "
        "`eval_wait` (what training waited for an evaluation beside it); when engines share the trainer's devices "
        "also `offload`, `onload`, `engines_sleep`, `engines_wake`; `rollout_wait` (what the trainer waited for "
        "episodes) and `engines_idle` (time since the last step in which no episode of training was under way); of "
        "memory: `train`, "
        "`sync`, `roll`",
    ),
    "{own}": ("[A-Za-z0-9_]+", "a name that a loss of your own gives"),
    "{owner}": ("[a-z]+", "who holds memory: see megatron_fleet/trainer/megatron/memory.py"),
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
    "mean_positive_reward": "Mean reward over the episodes whose reward is above 0; absent if there are no such "
    "episodes.",
    "avg_pass_at_1": "pass_at_1, by the name that Fleet's runs are compared by.",
    "avg_pass_at_{n}": "Share of prompts (with a known reward) that have any solved episode: a known reward of at "
    "least eval.pass_threshold.",
    "pass_at_{k}": "Mean over prompts with at least k known rewards of 1 − C(m−c, k)/C(m, k), m known, c of them "
    "solved (unbiased pass@k); equals avg_pass_at_{n} for k = n when nothing is unknown.",
    "variance_per_prompt": "Mean over prompts with at least 2 known rewards of their population variance.",
    "signal_ratio": "Share of prompts with at least 2 known rewards whose known rewards are not all equal.",
}

_ACTIVITY = {
    "avg_turns": "Mean turns per episode.",
    "avg_tool_calls": "Mean tool calls per episode, those of local tools left out.",
    "tool_calls_per_turn": "Tool calls divided by turns, over all episodes.",
    "avg_tool_errors": "Mean tool errors per episode: calls that the environment answered with an error, or that were "
    "refused because there is no such tool or the arguments are not an object.",
    "total_tool_errors": "Sum of tool errors.",
    "tool_error_rate": "Tool errors divided by tool calls, over all episodes; absent without tool calls.",
    "parse_error_rate": "Turns with a tool call that could not be parsed, divided by turns.",
    "no_action_rate": "Share of episodes that ended as `no_action`.",
    "no_action_turn_rate": "Turns with neither a tool call nor a final answer, divided by turns.",
    "repeated_call_rate": "Tool calls that equal an earlier one of the same episode, divided by tool calls.",
    "repeating_rate": "Share of episodes with such a call.",
    "max_repeat": "Most times in a row that an episode made the same call.",
    "avg_local_tool_calls": "Mean calls per episode of tools that the agent loop answers itself (paging, context).",
    "avg_truncated_outputs": "Mean tool results per episode that were cut.",
    "avg_images": "Mean images per episode that the policy was shown.",
    "avg_image_tokens": "Mean tokens of images per episode, all segments together.",
    "total_images_unseen": "Images that were left out: the model has no vision, or their file was broken.",
    "total_turns_past_deadline": "Turns that were cut at their deadline: rollout.engine.request_timeout_s and the time "
    "for their tokens at rollout.engine.min_tokens_per_s.",
    "false_completion_rate": "Episodes that ended as `completed` with a reward below eval.pass_threshold, divided by "
    "all that ended as `completed` with a known reward.",
    "think_token_share": "Tokens of thinking divided by tokens that the policy sampled.",
}

_EXTREMES = {"min_turns": "Fewest turns of an episode.", "max_turns": "Most turns of an episode."}

_RATES = {
    "infrastructure_failure_rate": "Share of episodes that ended as `env_failed` or `aborted`.",
    "verifier_unknown_rate": "Share of episodes that ended as `verifier_failed`.",
    "unknown_reward_rate": "Share of episodes whose reward is unknown, for whatever reason.",
}

_FAILURES = {**_RATES, "outcome/{outcome}": "Number of episodes that ended this way."}

_ENVIRONMENT = (
    *_family(("environment/", "environment/{env}/"), _ACTIVITY),
    Metric("environment/total_episodes", "Number of episodes."),
    Metric("environment/total_env_init_failed", "Number of episodes that ended as `env_failed`."),
    *_family(("environment/{env}/",), _EXTREMES | _FAILURES),
    Metric("environment/{env}/num_episodes", "Number of episodes."),
    Metric("environment/{env}/env_init_failed", "Number of episodes that ended as `env_failed`."),
    Metric("environment/{env}/trajectory_timeouts", "Number of episodes that ended as `timeout`."),
    Metric("environment/{env}/quarantined", "Episodes not played because the breaker was open (`env_failed`)."),
    Metric("environment/{env}/breaker_open", "1 if a worker's breaker was open when an episode ended, else 0."),
    Metric("environment/{env}/start_retries", "Times that a reset was repeated because the server was busy."),
    Metric(
        "environment/{env}/attempts_retried",
        "Episodes that ended with an unknown reward and were played again from the start, until one was kept.",
    ),
)

_LENGTHS = {
    "min_num_tokens": "Fewest tokens of a response: all but prompts, so observations included.",
    "max_num_tokens": "Most tokens of a response.",
    "avg_num_tokens": "Mean tokens of a response.",
    "std_num_tokens": "Population standard deviation of the tokens of a response.",
    "avg_tokens_non_zero_rewards": "avg_num_tokens over episodes with a known reward other than 0.",
    "avg_tokens_zero_rewards": "avg_num_tokens over episodes with reward 0.",
    "avg_tokens/{outcome}": "avg_num_tokens over episodes that ended this way.",
    "repeated_ngram_rate": "Stretches of 20 tokens of the policy that occurred before in its episode, divided by all "
    "stretches: loops, and repeated sentences.",
}

_GENERATE = {
    "action_tokens": "Tokens the policy sampled.",
    **_LENGTHS,
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
    "attempts_aborted": "Episodes that were lost with an engine or a worker and were played again.",
}

_ACCOUNTING = {
    **_ATTEMPTS,
    "episodes": "Episodes collected for this step; the sum of the seven fates below.",
    "trained": "Episodes that became training sequences (Datum).",
    "filtered": "Episodes left out because algorithm.group_filter leaves their group out; by default because all its "
    "known rewards are equal.",
    "unknown": "Episodes left out because their reward is unknown.",
    "too_few_known": "Episodes left out because no other reward of their group is known.",
    "masked": "Episodes whose reward counted for the group, but which were cut short (algorithm.masked_outcomes).",
    "too_old": "Episodes whose reward counted for the group, but whose tokens are older than rollout.max_staleness "
    "(rollout.too_old=mask or drop).",
    "no_tokens": "Episodes whose reward counted for the group, but in which the policy sampled no token.",
    "trained_tokens": "Tokens with a gradient.",
    "attempts_stale": "Episodes that were too old (rollout.max_staleness) and were played again.",
    "attempts_unfinished": "Episodes that were still playing when a batch was full, and were restarted "
    "(rollout.unfinished=again).",
    "attempts_replaced": "Episodes of groups without signal, in whose place another task was played "
    "(rollout.batch.max_replacements).",
}

_ASYNC = {
    "staleness_mean": "Mean over spans of sampled tokens of the weight versions between their sampling and the update.",
    "staleness_min": "The smallest of these.",
    "staleness_max": "The largest of these; at most rollout.max_staleness.",
    "staleness_ratio": "Share of these spans that are older than the weights that are updated.",
    "staleness_violation_count": "Episodes that were too old and were played again.",
    "trainer_waits_share": "timing/rollout_wait divided by the time since the batch before was complete.",
    "engines_idle_share": "timing/engines_idle divided by the same time.",
    "unfinished_groups": "Groups that were still playing when the batch was full.",
    "interrupted_episodes": "Episodes of the batch with a turn that was interrupted because its engine was put to "
    "sleep, and continued after the update (rollout.unfinished=continue).",
    "recomputed_tokens": "Prompt and turn tokens that engines recomputed to continue these turns.",
    "replaced_groups": "Times that a group of the batch was replaced because it had no signal.",
    "overtaking_share": "Share of the batch's groups that were taken before one drawn earlier, which still played "
    "(rollout.batch.window).",
    "length_ratio": "Mean sampled tokens of the batch's episodes, divided by the mean over all finished episodes "
    "since the start; below 1 while short episodes overtake long ones.",
}

_ENGINE = {
    "engines": "Engines at the end of the step; it changes with rollout.engine.replicas=auto.",
    "running_mean": "Mean requests that an engine computed together, over the engine steps of all engines since the "
    "step before; an evaluation in that time counts too.",
    "running_max": "Most of them in one engine step.",
    "waiting_mean": "Mean requests that an engine had no room to compute, over the same steps.",
    "waiting_max": "Most of them after one engine step.",
    "kv_cache_usage_mean": "Mean share of an engine's KV cache that running requests held, over the same steps.",
    "kv_cache_usage_max": "Largest of these shares.",
    "preemptions": "Times that a running request lost its KV cache to others and was computed again.",
    "episodes_allowed": "Episodes that may play at once at the end of the step: rollout.episodes_in_flight, or what "
    "auto has found.",
    "episodes_in_flight_mean": "Mean episodes that workers had, over the readings of the engines every two seconds "
    "while there were any; those included that start their environment (env.provisioning.lookahead).",
    "prompt_tokens": "Tokens of prompts that the engines computed, those found in the prefix cache left out.",
    "cached_prompt_tokens": "Tokens of prompts that were found in the prefix cache.",
    "generated_tokens": "Tokens that the engines sampled, those of aborted requests included.",
    "tokens_per_second": "generated_tokens divided by the seconds in which an engine had requests, added up over the "
    "engines: the mean speed of one engine at work.",
    "prefix_cache_hit_rate": "Share of the tokens of prompts that were found in the prefix cache.",
    "draft_acceptance_rate": "Share of the tokens proposed by the drafter that the model accepted (speculative).",
    "tokens_per_draft": "Mean tokens that a request gained by one proposal: the accepted ones and one more.",
}

_BILLED = {
    "sampled": "Billed by a hosted service (policy.trainer=hosted): tokens that it sampled since the step before, also "
    "for an evaluation; `cumulative`: since the run began, with what was computed again after a restart.",
    "prefill_cached": "Likewise: tokens of prompts that were found in its prefix cache.",
    "prefill_uncached": "Likewise: all other tokens of prompts, those of scored sequences included.",
    "trained": "Likewise: tokens of training sequences, for each pass over them.",
}

_LOSS = {
    "avg_final_rewards": "Mean reward of the trained episodes, after algorithm.reward_shaping.",
    "avg_raw_advantages": "Mean advantage over trained tokens, before the normaliser.",
    "avg_raw_advantages_abs": "Mean absolute advantage over trained tokens, before the normaliser.",
}

_GRADIENT = {
    "grad:snr": "Signal-to-noise ratio of the batch's gradient, mean over the sampled matrices: ‖Σg‖² / N² − 1, g the "
    "gradient of a micro-batch (of routed experts: of a micro-step of all ranks), n micro-batches, "
    "N² = n / (n − 1) Σ‖g − ḡ‖²; 0 is expected of noise alone, negative values are chance. This and the next three "
    "only every policy.gradient_metrics.every updates, from 64 × 64 samples of matrices of the layers.",
    "grad:megabytes_edited": "MiB of bfloat16 weights that the update changed: the share of sampled weights whose "
    "bfloat16 value changed × trained matrices of the layers × 2 bytes.",
    "grad:update_diversity": "Entropy, divided by log 10, of the histogram with ten equal bins of the magnitudes of Σg "
    "relative to the largest of their matrix: near 0 when few elements have nearly all of the gradient, 1 when all "
    "magnitudes are as frequent.",
    "grad:effective_rank": "Mean over the samples of exp(entropy of the singular values of Σg divided by their sum), "
    "divided by the sample's greatest possible rank (Roy and Vetterli 2007): 1/64 for one direction, towards 1 for "
    "many.",
}

_POLICY = {
    "final_loss": "The loss that was differentiated: policy_loss + kl_loss + entropy_loss, mean over the updates.",
    "policy_loss": "The policy term of the loss, correction included, mean over the updates of the batch.",
    "kl_loss": "algorithm.kl.coef × Σ normaliser × KL estimate, mean over the updates of the batch.",
    "entropy_loss": "−algorithm.entropy_coef × Σ normaliser × entropy, mean over the updates of the batch.",
    "policy_kl": "Mean over trained tokens of the estimate of KL(π‖π_ref) that algorithm.kl.estimator names.",
    "policy_kl_clamped": "Share of trained tokens whose k3 is clamped at 10, where it has no gradient; k3 only.",
    "policy_entropy": "Mean entropy of π at trained tokens, in nats.",
    "own/{own}": "Mean over trained tokens of a sum that a loss of your own gives (`algorithm.loss`, examples/).",
    "nll": "Mean −log π(token) over trained tokens (supervised warm start only).",
    "ratio_mean": "Mean of the loss's ratio over trained tokens: π/π_old (exactly 1 with one update per batch), its "
    "geometric mean over the sequence (gspo, gmpo), or π/μ (importance_weighted).",
    "ppo_clip_ratio": "Share of trained tokens that the bounds of the ratio changed: the sum of those below.",
    "ppo_clip_ratio_low": "Share of trained tokens with ratio < 1 − clip_low: gradient removed if the advantage is "
    "negative and not counted otherwise (ppo_clip, gspo, gmpo), weight raised (cispo), left out, as "
    "tokens whose log μ is not a number (importance_weighted).",
    "ppo_clip_ratio_high": "Share of trained tokens with ratio > 1 + clip_high: gradient removed if the advantage is "
    "positive and not counted otherwise (ppo_clip, gspo, gmpo), weight cut (cispo), left out (importance_weighted).",
    "ppo_clip_ratio_dual": "Share of trained tokens with negative advantage and ratio > dual_clip (ppo_clip).",
    "correction_weight_mean": "Mean over trained tokens of the correction's weight c; 1 when engine and trainer agree.",
    "correction_tokens": "Share of trained tokens whose weight the correction truncated or set to 0, those whose log μ "
    "is not a number among them.",
    "correction_sequences": "Share of sequences with trained tokens in which the correction touched one.",
    "correction_ess": "Effective sample size (Σc)² / Σc² divided by the trained tokens: 1 when all weigh the same.",
    "mismatch_kl": "KL(μ‖π), engine against trainer: mean of ρ − 1 − log ρ, ρ = π/μ, first update only (k3, ≥ 0).",
    "mismatch_kl_k1": "KL(μ‖π): mean of log μ − log π, first update only (k1).",
    "probe_difference": "Mean |log π_engine − log π_trainer| over the probe's tokens, worst engine; only when probed.",
    "mismatch_unknown_tokens": "Trained tokens whose log-prob is NaN in the engine or the trainer, first update only; "
    "the other metrics of the mismatch leave them out.",
    "rollout_train_prob_diff_mean": "Mean of μ/π over trained tokens, first update only: a ratio, 1 when they agree.",
    "rollout_train_prob_diff_std": "Unbiased standard deviation of μ/π over trained tokens, first update only.",
    "routing_replayed": "Share of tokens × expert layers whose experts were replayed; first update, and only with "
    "rollout.engine.routing_replay.",
    "routing_disagreement": "Share of the replayed experts that the trainer's router would not have taken; as above.",
    "packing_efficiency": "Tokens of the sequences divided by the width of the micro-batches they were packed into.",
    "response_length": "Mean trained tokens per trained episode.",
    "grad_norm": "Gradient norm before clipping, mean over the updates with a finite one.",
    "policy_lr": "Learning rate of the last update.",
    "policy_update_steps": "Optimizer steps taken.",
    "skipped_steps": "Optimizer steps skipped because loss or gradient was not finite.",
    "skipped_steps_total": "The same over the run, resumed parts included.",
    "grad_norm_spikes": "Optimizer steps whose gradient norm was above policy.safety.spike_factor × the median of the "
    "last 32; they were taken.",
    "weight_version": "Weight version synced at the end of the step.",
    **_GRADIENT,
}

_EVAL = {
    **_REWARD,
    **_ACTIVITY,
    **_EXTREMES,
    **_FAILURES,
    **_LENGTHS,
    "tasks": "Tasks selected to be played.",
    "tasks_scored": "Those with a known reward: fewer when eval.budget_s ended before, or when verifiers failed.",
    "episodes": "Number of episodes at the training temperature.",
    "action_tokens": "Tokens the policy sampled in them.",
    "greedy_avg_raw_reward": "avg_raw_reward of the greedy episodes.",
    "greedy_pass_at_1": "pass_at_1 of the greedy episodes.",
}

_TRAINER = {
    "global_step": "Number of the step, from 1.",
    "epoch": "Whole times that as many prompts as there are training tasks to draw from were drawn before the step.",
}

_DATA = {
    "mix/{env}": "Share of the step's prompts that are of the environment.",
    "mix_total/{env}": "The same over all steps of the run, resumed parts included.",
    "weight/{env}": "Target share of the environment in this step; see docs/understand/mixture.md.",
    "epoch/{env}": "Passes over the environment's training tasks: whole ones, and the part of the present one.",
    "signal/{env}": "Estimated share of groups whose known rewards are not all equal, older groups counting less "
    "(data.mixture.curriculum.half_life), from data.mixture.curriculum.prior; only with signal_weights.",
    "reward/{env}": "Estimated mean known reward of a group, older groups counting less; only with signal_weights.",
    "deferred/{env}": "Tasks that the present pass over the environment leaves out; only with defer_after.",
}

_CHECKPOINT = {
    "failed": "Checkpoints that could not be written so far; above 0 only with checkpoint.on_failure=continue.",
    "uploads": "Checkpoints copied to checkpoint.store.url since this attempt began, as this one is handed over.",
    "uploads_failed": "Failed attempts at an upload, likewise; each is repeated.",
    "uploads_waiting": "Checkpoints not uploaded yet, this one included.",
    "upload_seconds": "Seconds of the last finished upload.",
    "exports": "Checkpoints exported as HF folders since this attempt began (checkpoint.export).",
    "exports_failed": "Exports, checks of exports and copies of them to the store that failed, likewise.",
    "exports_waiting": "Exports that are not finished, this checkpoint's not included.",
    "export_seconds": "Seconds of the last finished export, without its check and its copy.",
    "export_difference": "Mean absolute difference, in nats, of the log-probs that vLLM computed with the last checked "
    "export from the trainer's.",
}

METRICS: tuple[Metric, ...] = (
    *_family(("reward/", "reward/{env}/"), _REWARD),
    *_ENVIRONMENT,
    *_family(("generate/",), _GENERATE),
    Metric(
        "generate/uploads_failed",
        "Files of training steps that could not be uploaded (logging.trajectories.upload), since this attempt began.",
    ),
    *_family(("accounting/",), _ACCOUNTING),
    *_family(("trainer/",), _TRAINER),
    *_family(("data/",), _DATA),
    *_family(("loss/",), _LOSS),
    *_family(("policy/",), _POLICY),
    *_family(("async/",), _ASYNC),
    *_family(("engine/",), _ENGINE),
    *_family(("tokens/", "tokens/cumulative/"), _BILLED),
    Metric("cost/step_usd", "US dollars for the tokens/ of this step; absent if the service's prices are not known."),
    Metric("cost/cumulative_usd", "US dollars for the tokens/cumulative/."),
    Metric(
        "timing/loop_lag_p99",
        "99th percentile of the seconds by which a worker's event loop wakes late; the worst worker's.",
    ),
    Metric("timing/provision_s/{env}", "Mean seconds from asking for an environment to its first observation."),
    Metric("timing/start_limit/{env}", "Mean number of resets that a worker had under way at most, as episodes ended."),
    Metric("timing/episode_s/{env}", "Mean seconds of an episode, verification included; `all` = of all environments."),
    Metric("timing/min_episode_s/{env}", "Seconds of the quickest episode, likewise."),
    Metric("timing/max_episode_s/{env}", "Seconds of the slowest episode, likewise."),
    Metric("timing/{phase}", "Wall-clock seconds of this phase."),
    Metric(
        "memory/{phase}/{owner}",
        "GiB that the owner holds when `train`, `sync` or `roll` begins (temporary: at most during it), on the rank "
        "that holds most.",
    ),
    *_family(("checkpoint/",), _CHECKPOINT),
    *_family(("eval/{env}/",), _EVAL),
    *_family(("eval/all/",), _ATTEMPTS),
    Metric(
        "eval/lag_steps",
        "Steps trained on from this one until its evaluation had ended; given by evaluation engines (eval.engines).",
    ),
    Metric("eval/lag_s", "Seconds from the time when that evaluation was due until it had ended, likewise."),
    Metric("eval/all/attempts_unstarted", "Episodes that no worker had begun when eval.budget_s was over."),
    Metric("eval/all/tasks_held_out", "Tasks of which eval.tasks were chosen to be played."),
    Metric("eval/all/greedy_tasks", "Tasks selected to be played greedily."),
    Metric("eval/all/greedy_tasks_scored", "Those with a known reward."),
    Metric("eval/all/uploads_failed", "Files of evaluations that could not be uploaded, since this attempt began."),
    Metric("eval/all/greedy_episodes", "Number of greedy episodes."),
    Metric("eval/all/greedy_action_tokens", "Tokens the policy sampled in the greedy episodes."),
    Metric("eval/all/greedy_outcome/{outcome}", "Number of greedy episodes that ended this way."),
)


def find(name: str) -> Metric | None:
    """Return the metric that ``name`` is an instance of."""
    return next((m for m in METRICS if m.matches(name)), None)


def render() -> str:
    """Return the registry as a Markdown page."""
    lines = [
        "# Metrics",
        "",
        "Generated by `python -m megatron_fleet.telemetry.registry > docs/reference/metrics.md`; do not edit.",
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
    lines += ["", "## Histograms", "", "To TensorBoard and W&B, at every training step.", ""]
    lines += ["| name | of |", "|---|---|", *(f"| `{name}` | {of} |" for name, of in DISTRIBUTIONS.items())]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(render(), end="")

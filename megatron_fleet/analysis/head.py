"""Head section of the report: key figures of the run."""

from __future__ import annotations

from megatron_fleet.analysis.document import Fact, Facts, Items, Section
from megatron_fleet.analysis.environments import ALL, EnvironmentResult, Status, environment_results
from megatron_fleet.analysis.run import EVALUATIONS, TRAINING, Run, resumed_at, wall_seconds
from megatron_fleet.analysis.statistics import Estimate
from megatron_fleet.analysis.wording import NOTHING, duration, interval, number, rate, value

TONES = {
    Status.IMPROVED: "good",
    Status.SATURATED: "good",
    Status.WORSE: "bad",
    Status.FAILING: "bad",
    Status.UNKNOWN: "warn",
    Status.UNCLEAR: "quiet",
    Status.FLAT: "quiet",
}
KIND_LABELS = {"eval": "training temperature", "greedy": "greedy"}
PLACES = {"eval": "the evaluation at training temperature", "greedy": "the greedy evaluation", TRAINING: "training"}


def head(run: Run) -> Section:
    facts = [_pass_fact(run, kind) for kind in EVALUATIONS]
    facts += [_reward_fact(run), _steps_fact(run), _episodes_fact(run), _tokens_fact(run)]
    facts += [_model_fact(run), _tasks_fact(run)]
    blocks = [Facts(tuple(fact for fact in facts if fact is not None))]
    notes = [Items(tuple(dict.fromkeys(run.notes)), "warn")] if run.notes else []
    return Section("summary", "Summary", (*blocks, *notes))


def overall(run: Run, kind: str) -> EnvironmentResult | None:
    """Return the result over all environments."""
    return next((r for r in environment_results(run, kind) if r.env == ALL), None)


def before_after(first: Estimate | None, last: Estimate | None, paired: bool) -> str:
    return f"{value(first)} → {value(last)}" if paired else value(first)


def _pass_fact(run: Run, kind: str) -> Fact | None:
    result = overall(run, kind)
    first, last = run.first_and_last(kind)
    if result is None:
        return None
    label = f"pass@1, {KIND_LABELS[kind]}"
    if last is None:
        return Fact(label, value(result.before), f"step {first} only {interval(result.before)}".rstrip())
    told = [f"step {step} {interval(e)}".rstrip() for step, e in ((first, result.before), (last, result.after))]
    told += [f"change {rate(result.change, signed=True)}"] if result.change is not None else []
    return Fact(label, before_after(result.before, result.after, True), ", ".join(told), TONES[result.status])


def _reward_fact(run: Run) -> Fact | None:
    rewards = [row["reward/avg_raw_reward"] for row in run.rows if row.get("reward/avg_raw_reward") is not None]
    if not rewards:
        return None
    count = min(5, max(1, len(rewards) // 2))
    first, last = (sum(part) / count for part in (rewards[:count], rewards[-count:]))
    return Fact("training reward", f"{first:.3f} → {last:.3f}", f"mean of the first and of the last {count} steps")


def _steps_fact(run: Run) -> Fact | None:
    if not run.rows:
        return None
    steps = [row for row in run.rows if "accounting/episodes" in row]
    planned = run.setting("run", "steps")
    attempts = len(resumed_at(run.rows)) + 1
    detail = f"in {duration(wall_seconds(run.rows))}" + (f", {attempts} attempts" if attempts > 1 else "")
    done = str(steps[-1]["step"]) if steps else "0"
    return Fact("training steps", f"{done} of {planned}" if planned is not None else done, detail)


def _episodes_fact(run: Run) -> Fact | None:
    steps = [row for row in run.rows if "accounting/episodes" in row]
    if not steps:
        return None
    total, trained, unknown = (
        sum(row.get(f"accounting/{name}") or 0 for row in steps) for name in ("episodes", "trained", "unknown")
    )
    return Fact(
        "training episodes", number(total), f"{number(trained)} trained on, {number(unknown)} with unknown reward"
    )


def _tokens_fact(run: Run) -> Fact | None:
    rates = [row["generate/tokens_per_second"] for row in run.rows if row.get("generate/tokens_per_second") is not None]
    total = sum(row.get("generate/action_tokens") or 0 for row in run.rows)
    if not rates:
        return None
    return Fact(
        "tokens sampled in training", number(total), f"{number(sum(rates) / len(rates))} per second of generation"
    )


def _model_fact(run: Run) -> Fact:
    return Fact("model", run.model.rstrip("/").rpartition("/")[2] or NOTHING, run.model)


def _tasks_fact(run: Run) -> Fact:
    source = str(run.split.get("source") or run.setting("data", "tasks") or NOTHING)
    keys = {side: run.split.get(side) for side in ("train", "eval", "retired")}
    sides = [f"{len(found)} {side}" for side, found in keys.items() if isinstance(found, list) and found]
    digest = run.split.get("sha256")
    told = f"SHA-256 {str(digest)[:16]}…" if digest else "content hash not recorded"
    return Fact("tasks", source.rstrip("/").rpartition("/")[2] or source, ", ".join([told, *sides]))

"""Sections of a report, each a pure function of a run: first the head with the key figures."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

from megatron_fleet.analysis.document import (
    Block,
    Browser,
    Cell,
    Charts,
    Comparison,
    Fact,
    Facts,
    Items,
    ReportSection,
    Table,
    Text,
)
from megatron_fleet.analysis.environments import (
    ALL,
    FEW,
    FINE,
    RULES,
    EnvironmentResult,
    Signal,
    Status,
    environment_results,
    signals,
)
from megatron_fleet.analysis.episodes import Episode
from megatron_fleet.analysis.failures import CATEGORIES, by_category
from megatron_fleet.analysis.run import EVALUATIONS, TRAINING, Run
from megatron_fleet.analysis.selection import Pair
from megatron_fleet.analysis.statistics import (
    NOTHING,
    RESAMPLES,
    Estimate,
    interval,
    number,
    percent,
    rate,
    value,
)
from megatron_fleet.telemetry.charts import charts, resumed_at
from megatron_fleet.telemetry.console import duration
from megatron_fleet.telemetry.summary import seconds_total

EXAMPLES = 3
NO_EVALUATION = "There are no trajectories of an evaluation."
NO_TRAJECTORIES = "There are no trajectories."
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


def head(run: Run) -> ReportSection:
    facts = [_pass_fact(run, kind) for kind in EVALUATIONS]
    facts += [_reward_fact(run), _steps_fact(run), _episodes_fact(run), _tokens_fact(run)]
    facts += [_cost_fact(run), _model_fact(run), _tasks_fact(run)]
    blocks = [Facts(tuple(fact for fact in facts if fact is not None))]
    notes = [Items(tuple(dict.fromkeys(run.notes)), "warn")] if run.notes else []
    return ReportSection("summary", "Summary", (*blocks, *notes))


def _pass_fact(run: Run, kind: str) -> Fact | None:
    result = next((r for r in environment_results(run, kind) if r.env == ALL), None)
    first, last = run.first_and_last(kind)
    if result is None:
        return None
    label = f"pass@1, {KIND_LABELS[kind]}"
    if last is None:
        return Fact(label, value(result.before), f"step {first} only {interval(result.before)}".rstrip())
    details = [f"step {step} {interval(e)}".rstrip() for step, e in ((first, result.before), (last, result.after))]
    details += [f"change {rate(result.change, signed=True)}"] if result.change is not None else []
    return Fact(label, f"{value(result.before)} → {value(result.after)}", ", ".join(details), TONES[result.status])


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
    detail = f"in {duration(seconds_total(run.rows))}" + (f", {attempts} attempts" if attempts > 1 else "")
    if not any("time" in row for row in run.rows):
        detail = "of which there are trajectories; duration not recorded"
    done = str(steps[-1]["step"]) if steps else str(max(run.training_steps, default=0))
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


def _cost_fact(run: Run) -> Fact | None:
    costs = [row["cost/cumulative_usd"] for row in run.rows if row.get("cost/cumulative_usd") is not None]
    if not costs:
        return None
    steps = [row["cost/step_usd"] for row in run.rows if row.get("cost/step_usd") is not None]
    return Fact("cost at the service", f"${costs[-1]:,.2f}", f"${sum(steps) / len(steps):,.2f} per step on average")


def _model_fact(run: Run) -> Fact:
    return Fact("model", run.model.rstrip("/").rpartition("/")[2] or NOTHING, run.model)


def _tasks_fact(run: Run) -> Fact:
    source = str(run.split.get("source") or run.setting("data", "tasks") or NOTHING)
    keys = {side: run.split.get(side) for side in ("train", "eval", "retired")}
    sides = [f"{len(found)} {side}" for side, found in keys.items() if isinstance(found, list) and found]
    digest = run.split.get("sha256")
    details = f"SHA-256 {str(digest)[:16]}…" if digest else "content hash not recorded"
    return Fact("tasks", source.rstrip("/").rpartition("/")[2] or source, ", ".join([details, *sides]))


def environments(run: Run) -> ReportSection:
    blocks: list[Block] = []
    for kind in KIND_LABELS:
        results = environment_results(run, kind)
        if results:
            first, last = run.first_and_last(kind)
            span = f"step {first} → step {last}" if last is not None else f"step {first} only"
            blocks += [Text(f"pass@1, {KIND_LABELS[kind]}, {span}:"), _environment_table(results, last is not None)]
    if not blocks:
        return ReportSection("environments", "Environments", (Text(NO_EVALUATION),))
    return ReportSection("environments", "Environments", tuple(blocks))


def _environment_table(results: Sequence[EnvironmentResult], paired: bool) -> Table:
    rates = ("change", "before", "after") if paired else ("pass@1",)  # what matters most is seen on narrow screens
    head = ("environment", "status", *rates, "tasks", "unknown rewards")
    return Table(head, tuple(_environment_row(r, paired) for r in results), frozenset(range(2, len(head))))


def _environment_row(result: EnvironmentResult, paired: bool) -> tuple[Cell, ...]:
    tasks = result.after.tasks if result.after else 0
    before, after = (_estimate_cell(e) for e in (result.before, result.after))
    delta = _estimate_cell(result.change, signed=True)
    unknown = " → ".join(str(n) for n in result.unknown) if paired else str(result.unknown[1])
    warn = "warn" if any(result.unknown) else "quiet"
    title = f"of {result.episodes[0]} and {result.episodes[1]} episodes" if paired else f"of {result.episodes[1]}"
    head = Cell(result.env), Cell(result.status, None, TONES[result.status], RULES[result.status])
    tail = Cell(str(tasks), tasks), Cell(unknown, sum(result.unknown), warn, title)
    return (*head, delta, before, after, *tail) if paired else (*head, before, *tail)


def _estimate_cell(estimate: Estimate | None, *, signed: bool = False) -> Cell:
    if estimate is None:
        return Cell(NOTHING)
    return Cell(rate(estimate, signed=signed), estimate.value, title=f"{estimate.tasks} tasks")


def curves(run: Run) -> ReportSection:
    drawn = charts(run.rows)
    return ReportSection("curves", "Curves", (Charts(drawn),) if drawn else (Text("There are no metrics to draw."),))


def learning_signal(run: Run) -> ReportSection:
    rows = signals(run.rows)
    if not rows:
        return ReportSection(
            "signal", "Learning signal", (Text("No training step has two known rewards of one prompt."),)
        )
    head = ("environment", "steps", "mean reward", "variance", "steps with signal", "prompts with signal", "advice")
    table = Table(head, tuple(_signal_row(row) for row in rows), frozenset(range(1, 6)))
    return ReportSection("signal", "Learning signal", (Text(SIGNAL_TEXT), table))


SIGNAL_TEXT = (
    "A group whose known rewards are all equal has no gradient. A step has signal when some prompt of the environment "
    f"has rewards that differ. Below {percent(FEW)} of steps an environment is too hard or too easy: its mean reward "
    f"shows which of the two."
)


def _signal_row(row: Signal) -> tuple[Cell, ...]:
    tone = "good" if row.advice == FINE else "warn"
    return (
        Cell(row.env),
        Cell(str(row.steps), row.steps),
        Cell(f"{row.reward:.3f}", row.reward),
        Cell(f"{row.variance:.3f}", row.variance),
        Cell(percent(row.steps_with_signal), row.steps_with_signal, tone),
        Cell(percent(row.prompts_with_signal), row.prompts_with_signal, tone),
        Cell(row.advice, None, tone),
    )


def behaviour(run: Run) -> ReportSection:
    kind = run.main_kind
    first, last = run.first_and_last(kind)
    moments = [(step, run.episodes(kind, step)) for step in (first, last) if step is not None]
    if not moments:
        return ReportSection("behaviour", "Turns, tools and tokens", (Text(NO_TRAJECTORIES),))
    return ReportSection(
        "behaviour",
        "Turns, tools and tokens",
        (
            Text(f"Per episode of {PLACES[kind]}."),
            _activity_table(moments),
            Text("Tokens by outcome and result; tokens count prompt and observations, sampled ones do not."),
            _tokens_table(moments),
        ),
    )


def _activity_table(moments: Sequence[tuple[int, list[Episode]]]) -> Table:
    thinking = any("think_tokens" in e.metrics for _, episodes in moments for e in episodes)
    head = (
        "environment",
        "step",
        "turns",
        "tool calls",
        "errors / calls",
        "repeated / calls",
        "sampled tokens",
        "thinking",
    )
    rows = []
    for env in ["all", *sorted({e.env for _, episodes in moments for e in episodes})]:
        for step, episodes in moments:
            own = [e for e in episodes if env in ("all", e.env)]
            rows.append((Cell(env), Cell(str(step), step), *_activity(own, thinking)))
    return Table(head, tuple(rows), frozenset(range(1, len(head))))


def _activity(episodes: Sequence[Episode], thinking: bool) -> list[Cell]:
    def total(name: str) -> float:
        return sum(e.metrics.get(name, 0.0) for e in episodes)

    calls, sampled = total("tool_calls"), float(sum(e.action_tokens for e in episodes))
    count = len(episodes) if any(e.metrics for e in episodes) else 0
    means = [amount / count if count else None for amount in (total("turns"), calls)]
    shares = [amount / calls if calls else None for amount in (total("tool_errors"), total("repeated_calls"))]
    share = total("think_tokens") / sampled if thinking and sampled else None
    tokens = sampled / count if count and sampled else None
    return [
        *(Cell(NOTHING if mean is None else f"{mean:.2f}", mean) for mean in means),
        *(Cell(percent(s), s) for s in shares),
        Cell(number(tokens), tokens),
        Cell(percent(share), share, title="" if thinking else "the run did not record think_tokens"),
    ]


def _tokens_table(moments: Sequence[tuple[int, list[Episode]]]) -> Table:
    head = ("outcome", "result", "step", "episodes", "share", "tokens", "sampled tokens", "turns")
    rows = []
    for step, episodes in moments:
        groups: defaultdict[tuple[str, str], list[Episode]] = defaultdict(list)
        for episode in episodes:
            groups[episode.outcome, episode.result].append(episode)
        for (outcome, result), own in sorted(groups.items(), key=lambda item: -len(item[1])):
            means = [_mean(own, lambda e: e.tokens), _mean(own, lambda e: e.action_tokens)]
            turns = _mean(own, lambda e: e.metrics.get("turns", 0.0))
            share = len(own) / len(episodes)
            rows.append(
                (
                    Cell(outcome),
                    Cell(result, None, {"solved": "good", "unknown": "warn"}.get(result, "")),
                    Cell(str(step), step),
                    Cell(str(len(own)), len(own)),
                    Cell(percent(share), share),
                    *(Cell(number(round(mean)), mean) for mean in means),
                    Cell(f"{turns:.2f}", turns),
                )
            )
    return Table(head, tuple(rows), frozenset(range(2, len(head))))


def _mean(episodes: Sequence[Episode], of: Callable[[Episode], float]) -> float:
    return sum(of(e) for e in episodes) / len(episodes)


def errors(run: Run) -> ReportSection:
    kind = run.main_kind
    first, last = run.first_and_last(kind)
    if first is None:
        return ReportSection("errors", "Errors", (Text(NO_TRAJECTORIES),))
    found = {step: by_category(run.episodes(kind, step)) for step in (first, last) if step is not None}
    if not any(episodes for categories in found.values() for episodes in categories.values()):
        return ReportSection("errors", "Errors", (Text(f"No episode of {PLACES[kind]} belongs to any category."),))
    intro = Text(f"Episodes of {PLACES[kind]}; one episode may be in several rows.")
    return ReportSection("errors", "Errors", (intro, _error_table(run, kind, found), *_error_environments(found)))


Found = dict[int, dict[str, list[tuple[Episode, str]]]]


def _error_table(run: Run, kind: str, found: Found) -> Table:
    steps = list(found)
    totals = {step: len(run.episodes(kind, step)) for step in steps}
    rows = []
    for category in CATEGORIES:
        counts = [len(found[step][category.key]) for step in steps]
        if not any(counts):
            continue
        newest = [pair for step in reversed(steps) for pair in found[step][category.key]][:EXAMPLES]
        cells = [
            Cell(f"{count} ({percent(count / totals[step])})", count) for step, count in zip(steps, counts, strict=True)
        ]
        example = Cell(newest[0][1][:90], None, "quiet", newest[0][1], tuple(e.id for e, _ in newest))
        rows.append((Cell(category.label, title=category.rule), *cells, example))
    head = ("category", *(f"step {step}" for step in steps), "example")
    return Table(head, tuple(rows), frozenset(range(1, len(steps) + 1)))


def _error_environments(found: Found) -> list[Block]:
    """Build a table of environments × categories; omitted when there is only one environment."""
    counts = {
        step: {c.key: Counter(e.env for e, _ in categories[c.key]) for c in CATEGORIES}
        for step, categories in found.items()
    }
    envs = sorted({env for step in counts.values() for counter in step.values() for env in counter})
    used = [c for c in CATEGORIES if any(step[c.key] for step in counts.values())]
    if len(envs) < 2:
        return []
    rows = []
    for env in envs:
        cells = []
        for c in used:
            numbers = [step[c.key][env] for step in counts.values()]
            cells.append(Cell(" → ".join(map(str, numbers)), numbers[-1], "" if any(numbers) else "quiet"))
        rows.append((Cell(env), *cells))
    head = ("environment", *(c.label for c in used))
    steps = " → ".join(f"step {step}" for step in found)
    return [Text(f"Per environment, {steps}:"), Table(head, tuple(rows), frozenset(range(1, len(head))))]


def differences(run: Run, pairs: Sequence[Pair]) -> ReportSection:
    if not pairs:
        return ReportSection("differences", "Before and after", (Text("No task was evaluated twice."),))
    first, last = run.first_and_last(run.main_kind)
    verdicts = Counter(pair.verdict for pair in pairs)
    details = ", ".join(f"{verdicts[name]} {name}" for name in ("gained", "lost", "same", "unknown") if verdicts[name])
    text = f"The same task and sample index at step {first} and step {last}: {len(pairs)} tasks chosen, {details}."
    return ReportSection("differences", "Before and after", (Text(text), Comparison(tuple(pairs))))


def trajectories(shown: Sequence[str]) -> ReportSection:
    """Build the section of trajectories; ``shown``: sentences about episodes missing from the page."""
    return ReportSection("trajectories", "Trajectories", (*map(Text, shown), Browser()))


def method(run: Run) -> ReportSection:
    """Build the glossary: every threshold and rule that the other sections use."""
    statuses = tuple(f"{status}: {RULES[status]}." for status in Status)
    categories = tuple(f"{c.label}: {c.rule}." for c in CATEGORIES)
    return ReportSection(
        "method",
        "Definitions",
        (
            Text(
                f"A task is solved when its reward is at least {run.pass_threshold:g} (eval.pass_threshold). An "
                "unknown reward (environment or verifier failed) is in no mean and is never counted as 0. pass@1 is "
                "the mean over tasks of the share of attempts that solved the task. Brackets hold 95 % percentile "
                f"bootstrap intervals over tasks ({RESAMPLES} resamples, fixed seed); a change is paired by task. An "
                "interval without width says that the tasks agree, not that the value is certain."
            ),
            Text("Status, the first that fits:"),
            Items(statuses),
            Text("Categories of errors:"),
            Items(categories),
        ),
    )

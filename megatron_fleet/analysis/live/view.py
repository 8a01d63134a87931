"""Contents of the live page as values of JSON: figures, timeline, tables, alerts and curves of a run at one moment."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from megatron_fleet.analysis.document import Cell, Fact, Table
from megatron_fleet.analysis.episodes import number_of, shown
from megatron_fleet.analysis.live.follow import MetricsTail, Row, RunFollower
from megatron_fleet.analysis.statistics import NOTHING, number, percent
from megatron_fleet.config.files import environment_name
from megatron_fleet.telemetry.charts import charts, draw, sparkline
from megatron_fleet.telemetry.console import duration
from megatron_fleet.telemetry.status import PhaseStatus, RunStatus

SILENT_S = 60.0
"""A run that says nothing for so long has probably died."""
TIMELINE_STEPS = 12
ETA_STEPS = 10
SPARK_WIDTH = 16
TREND_STEPS = 200
"""Newest steps in the trend of an environment."""
ERRORS_RATE = 0.5
"""A higher share of tool calls that fail is marked."""
GIB = 1 << 30
BESIDE_STEP = ("eval",)
"""Phases that ``timing/step`` does not include."""
PHASES = (
    ("generate", ("rollout_wait", "generate", "rollout"), "generate"),
    ("data", ("compute_advantages_and_returns", "convert_to_training_input"), "advantages and packing"),
    ("move", ("offload", "onload", "engines_sleep", "engines_wake", "to_trainer"), "offload and wake"),
    ("train", ("policy_train",), "train"),
    ("sync", ("sync_weights", "send_weights", "probe_trainer", "probe_engines"), "sync weights"),
    ("eval", ("eval", "eval_wait", "evaluation", "greedy"), "evaluation"),
    ("save", ("save_checkpoints",), "checkpoint"),
)
"""Colour of the timeline, the phases that have it (by their first word), and its label."""
OTHER = ("other", "other")
_SVG = "http://www.w3.org/2000/svg"
_ENVIRONMENT_HEAD = (
    ("environment", ""),
    ("reward", "mean reward of the newest step with a known one"),
    ("trend", f"training reward of the newest {TREND_STEPS} steps"),
    ("held-out pass@1", "newest evaluation, training temperature"),
    ("signal", "share of prompts whose known rewards differ"),
    ("turns", "mean per episode"),
    ("tool errors", "share of tool calls"),
    ("failed", "share of episodes that failed for reasons of infrastructure or of the verifier"),
    ("s / episode", "mean seconds of an episode"),
    ("this step", "episodes that ended since the step began, and the mean of their known rewards"),
)


def now(follower: RunFollower, clock: float) -> dict[str, Any]:
    """Return everything but curves and trajectories. ``clock``: unix time."""
    with follower.lock:
        run, status, metrics = follower.run, follower.status, follower.metrics
        silent = status is not None and clock - status.time > SILENT_S
        moment = status.time if status is not None and silent else clock  # the phases of a dead run do not go on
        name = status.name if status else run.name
        where = [shown(run.folder.resolve().name), *([f"model {run.model}"] if run.model else [])]
        return {
            "name": shown(name),
            "subtitle": " · ".join(where),
            "state": _state(status, clock),
            "facts": [asdict(fact) for fact in _facts(follower, moment)],
            "timeline": _timeline(metrics, status, moment),
            "tables": {
                "awaited": _json(_awaited(status, moment)),
                "engines": _json(_engines(metrics, status)),
                "environments": _json(_environments(follower)) | {"titles": [title for _, title in _ENVIRONMENT_HEAD]},
                "memory": _json(_memory(metrics, status)),
            },
            "alerts": [] if status is None else [asdict(a) | {"text": shown(a.text)} for a in reversed(status.alerts)],
            "notes": [shown(problem) for problem in follower.problems],
            "environments": follower.environments(),
            "versions": {"charts": metrics.version, "episodes": follower.version},
        }


def curves(follower: RunFollower) -> list[dict[str, Any]]:
    """Return the charts of the report, drawn."""
    with follower.lock:
        rows = list(follower.metrics.rows)
    found = []
    for chart in charts(rows):
        drawing = draw(chart).replace("<svg ", f'<svg xmlns="{_SVG}" ', 1)
        found.append({"title": chart.title, "svg": drawing, "lines": [line.label for line in chart.series]})
    return found


def listed(row: Row) -> dict[str, Any]:
    """Return a row of the list of trajectories."""
    fields = {name: getattr(row, name) for name in Row.__slots__ if name not in ("kind", "step", "line")}
    return fields | {"id": f"{row.kind}-{row.step}-{row.line}", "set": f"{row.kind} {row.step}"}


def _json(table: Table) -> dict[str, Any]:
    rows = [[{"text": c.text, "sort": c.sort, "tone": c.tone, "title": c.title} for c in row] for row in table.rows]
    return {"head": list(table.head), "numbers": sorted(table.numbers), "rows": rows}


def _state(status: RunStatus | None, clock: float) -> dict[str, str]:
    if status is None:
        return {"text": "no status.json", "tone": "quiet", "detail": "The run has not written its status yet."}
    if status.state == "running" and clock - status.time > SILENT_S:
        age = duration(clock - status.time)
        return {
            "text": f"silent for {age}",
            "tone": "bad",
            "detail": "The run was killed, or its disk does not answer.",
        }
    tones = {"running": "good", "finished": "good", "stopped": "warn", "failed": "bad"}
    detail = f"process {status.pid} on {shown(status.host)}"
    return {"text": status.state, "tone": tones[status.state], "detail": detail}


def _facts(follower: RunFollower, clock: float) -> Iterable[Fact]:
    metrics, status = follower.metrics, follower.status
    yield _step_fact(follower)
    if status is not None and status.state == "running":
        yield _phase_fact(status, clock)
        limit = "" if status.allowed is None else f", at most {status.allowed} may play now"
        yield Fact("episodes", f"{status.playing} playing", f"{status.waiting} waiting for a worker{limit}")
    yield from _value_facts(metrics)
    speed = metrics.latest("generate/tokens_per_second")
    if status is not None and status.engines:
        total = sum(engine.tokens_per_s for engine in status.engines)
        last = f"{number(speed[1])} in step {speed[0]}" if speed else ""
        yield Fact("tokens per second", number(total), last)
    elif speed:
        yield Fact("tokens per second", number(speed[1]), f"step {speed[0]}")
    if cost := metrics.latest("cost/cumulative_usd"):
        _, of_step = metrics.latest("cost/step_usd") or (0, 0.0)
        yield Fact("cost so far", f"${cost[1]:,.2f}", f"${of_step:,.2f} in step {cost[0]}")


def _step_fact(follower: RunFollower) -> Fact:
    metrics, status = follower.metrics, follower.status
    done = status.step if status else next((row["step"] for row in reversed(metrics.rows)), 0)
    planned = status.steps if status else number_of(follower.run.setting("run", "steps"))
    seconds = [row["timing/step"] for row in metrics.recent if "timing/step" in row][-ETA_STEPS:]
    details = []
    if seconds:
        mean = sum(seconds) / len(seconds)
        details.append(f"{duration(mean)} per step")
        if planned and planned > done:
            details.append(f"{duration(mean * (planned - done))} left")
    return Fact("steps", f"{done} of {planned:g}" if planned else str(done), ", ".join(details))


def _phase_fact(status: RunStatus, clock: float) -> Fact:
    running = [phase for phase in status.phases if phase.seconds is None]
    if not running:
        return Fact("now", "between phases")
    texts = [shown(p.name) + (f" {p.done}/{p.total}" if p.total else "") for p in running]
    return Fact("now", texts[-1], ", ".join([f"for {duration(max(0.0, clock - running[-1].began))}", *texts[:-1]]))


def _value_facts(metrics: MetricsTail) -> Iterable[Fact]:
    for label, name in (("training reward", "reward/avg_raw_reward"), ("held-out pass@1", "eval/all/pass_at_1")):
        first, last = next((row for row in metrics.rows if name in row), None), metrics.latest(name)
        if first is None or last is None:
            continue
        if first["step"] == last[0]:
            yield Fact(label, f"{last[1]:.3f}", f"step {last[0]}")
        else:
            yield Fact(label, f"{first[name]:.3f} → {last[1]:.3f}", f"step {first['step']} → step {last[0]}")


def _timeline(metrics: MetricsTail, status: RunStatus | None, clock: float) -> dict[str, Any]:
    """Return the parts of the newest steps, newest first, and of the current one."""
    rows = [row for row in metrics.recent if "timing/step" in row][-TIMELINE_STEPS:]
    steps: list[dict[str, Any]] = [{"step": f"step {row['step']}", "parts": _parts(row)} for row in reversed(rows)]
    current: dict[str, Any] | None = None
    if status is not None and status.state == "running" and status.phases:
        began = min(phase.began for phase in status.phases)
        parts = [_part(phase, began, max(clock, phase.began)) for phase in status.phases]
        current = {"step": "start" if status.step_began is None else f"step {status.step + 1}", "parts": parts}
    shown_parts = [part for step in [*steps, *([current] if current else [])] for part in step["parts"]]
    used = {part["kind"] for part in shown_parts}
    legend = [(kind, label) for kind, _, label in PHASES if kind in used] + ([OTHER] if "other" in used else [])
    for step in [*steps, *([current] if current else [])]:
        step["seconds"] = max(part["start"] + part["seconds"] for part in step["parts"])
        step["text"] = duration(step["seconds"])
    return {"steps": steps, "current": current, "legend": legend}


def _parts(row: Mapping[str, float]) -> list[dict[str, Any]]:
    """Return the phases of a finished step one after the other; what no phase accounts for comes last."""
    parts: list[dict[str, Any]] = []
    inside = start = 0.0
    for kind, names, label in PHASES:
        found = {name: row[f"timing/{name}"] for name in names if f"timing/{name}" in row}
        if "rollout_wait" in found:  # while the rest of the generation ran beside the training
            found.pop("generate", None)
        inside += sum(seconds for name, seconds in found.items() if name not in BESIDE_STEP)
        if seconds := sum(found.values()):
            parts.append({"kind": kind, "start": start, "seconds": seconds, "text": f"{label} {duration(seconds)}"})
            start += seconds
    rest = row["timing/step"] - inside
    if rest > 0.01 * row["timing/step"]:
        parts.append({"kind": OTHER[0], "start": start, "seconds": rest, "text": f"{OTHER[1]} {duration(rest)}"})
    return parts


def _part(phase: PhaseStatus, began: float, clock: float) -> dict[str, Any]:
    seconds = clock - phase.began if phase.seconds is None else phase.seconds
    label = shown(phase.name) + (f" {phase.done}/{phase.total}" if phase.total else "")
    return {
        "kind": _kind(phase.name),
        "start": phase.began - began,
        "seconds": seconds,
        "running": phase.seconds is None,
        "text": f"{label} {duration(seconds)}",
    }


def _kind(name: str) -> str:
    first = (name.split() or [""])[0]
    return next((kind for kind, names, _ in PHASES if first in names), OTHER[0])


def _awaited(status: RunStatus | None, clock: float) -> Table:
    """Return the groups that the current phase waits for, those that began first."""
    head = ("task", "environment", "episodes ended", "for")
    running = [] if status is None else [phase for phase in status.phases if phase.seconds is None]
    rows = []
    for one in (one for phase in running for one in phase.awaited):
        seconds = max(0.0, clock - one.began)
        ended = Cell(f"{one.done} of {one.total}", one.done)
        rows.append((Cell(shown(one.name)), Cell(shown(one.kind)), ended, Cell(duration(seconds), seconds)))
    return Table(head, tuple(rows), frozenset({2, 3}))


def _engines(metrics: MetricsTail, status: RunStatus | None) -> Table:
    if status is not None and status.engines:
        head = ("engine", "state", "running", "waiting", "KV cache", "tokens/s")
        engines = tuple(
            (
                Cell(shown(engine.name)),
                Cell("serving", tone="good") if engine.serving else Cell("not serving", tone="warn"),
                _number(engine.running),
                _number(engine.waiting, "warn" if engine.waiting > engine.running > 0 else ""),
                _number(engine.kv_usage, "warn" if engine.kv_usage > 0.95 else "", percent),
                _number(engine.tokens_per_s),
            )
            for engine in status.engines
        )
        return Table(head, engines, frozenset(range(2, len(head))))
    last = metrics.recent[-1] if metrics.recent else {}
    found = [(name.removeprefix("engine/"), value) for name, value in last.items() if name.startswith("engine/")]
    rows = [(Cell(name), Cell(number(value) if value >= 100 else f"{value:.4g}", value)) for name, value in found]
    return Table(("engines in the last step", ""), tuple(rows), frozenset({1}))


def _environments(follower: RunFollower) -> Table:
    names = follower.environments()
    status = follower.status
    live = {environment_name(env): value for env, value in status.environments.items()} if status else {}
    rows = []
    for env in names:
        latest, cells = follower.metrics.latest, [Cell(env)]
        name = f"reward/{env}/avg_raw_reward"
        values = [row[name] for row in follower.metrics.rows[-TREND_STEPS:] if name in row]
        cells += [
            _metric(latest(name)),
            Cell(sparkline(values, SPARK_WIDTH) if values else ""),
        ]
        cells += [_metric(latest(f"eval/{env}/pass_at_1")), _metric(latest(f"reward/{env}/signal_ratio"), percent)]
        cells += [_metric(latest(f"environment/{env}/avg_turns"), lambda value: f"{value:.1f}")]
        errors = latest(f"environment/{env}/tool_error_rate")
        cells.append(_metric(errors, percent, "bad" if errors and errors[1] > ERRORS_RATE else ""))
        failed = [latest(f"environment/{env}/{rate}_rate") for rate in ("infrastructure_failure", "verifier_unknown")]
        known = [value for value in failed if value]
        whole = (known[0][0], sum(value for _, value in known)) if known else None
        cells.append(_metric(whole, percent, "warn" if whole and whole[1] > 0 else ""))
        cells.append(_metric(latest(f"timing/episode_s/{env}"), lambda value: f"{value:.1f}"))
        cells.append(_this_step(live.get(env)))
        rows.append(tuple(cells))
    head = tuple(label for label, _ in _ENVIRONMENT_HEAD)
    return Table(head, tuple(rows), frozenset({1, 3, 4, 5, 6, 7, 8}))


def _this_step(live: Any) -> Cell:
    if live is None:
        return Cell(NOTHING, tone="quiet")
    reward = "" if live.reward is None else f", reward {live.reward:.2f}"
    errors = f"{live.tool_errors} of {live.tool_calls} tool calls failed"
    if live.quarantined:
        return Cell(f"{live.quarantined} not played: quarantine", live.episodes, "bad")
    tone = "warn" if live.tool_errors > ERRORS_RATE * live.tool_calls else ""
    return Cell(f"{live.episodes} ended{reward}", live.episodes, tone, errors)


def _metric(found: tuple[int, float] | None, form: Callable[[float], str] = "{:.3f}".format, tone: str = "") -> Cell:
    if found is None:
        return Cell(NOTHING, tone="quiet")
    return Cell(form(found[1]), found[1], tone, f"step {found[0]}")


def _number(value: float, tone: str = "", form: Callable[[float], str] = number) -> Cell:
    return Cell(form(value), value, tone)


def _memory(metrics: MetricsTail, status: RunStatus | None) -> Table:
    """Return the memory of the host by kind of process, and what each owner holds on the fullest rank per phase."""
    rows: list[tuple[Cell, ...]] = []
    if status is not None and status.memory:
        host = {name: status.memory[name] for name in ("host_used", "host_total") if name in status.memory}
        own = {name: size for name, size in status.memory.items() if name not in host}
        rows += [_bytes(f"{shown(name)} (host)", size) for name, size in own.items()]
        if len(host) == 2 and host["host_total"]:
            share = host["host_used"] / host["host_total"]
            used = f"{host['host_used'] / GIB:.1f} of {host['host_total'] / GIB:.1f}"
            rows.append(
                (Cell("whole host"), Cell(used, share, "bad" if share > 0.95 else "warn" if share > 0.85 else ""))
            )
    last: Sequence[Mapping[str, float]] = [row for row in metrics.recent if any(n.startswith("memory/") for n in row)]
    for name, value in sorted(last[-1].items()) if last else ():
        if name.startswith("memory/") and value >= 0.01:
            phase, _, owner = name.removeprefix("memory/").partition("/")
            rows.append((Cell(f"{owner}, in {phase} (rank)"), Cell(f"{value:.2f}", value)))
    return Table(("memory", "GiB"), tuple(rows), frozenset({1}))


def _bytes(name: str, size: int) -> tuple[Cell, Cell]:
    return Cell(name), Cell(f"{size / GIB:.2f}", float(size))

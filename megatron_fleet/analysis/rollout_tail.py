"""Section of a report on what steps wait for: shares of waiting, episodes played again, and the longest episodes."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from megatron_fleet.analysis.document import Block, Cell, Fact, Facts, ReportSection, Table, Text
from megatron_fleet.analysis.selection import EpisodeTime
from megatron_fleet.analysis.statistics import number, percent

ENDS = 5
"""First and last steps that are compared."""
AGAIN = {
    "stale": "older than rollout.max_staleness",
    "unfinished": "stopped when the batch was full",
    "replaced": "groups without signal that were replaced",
}
TABLE_TEXT = (
    "Seconds of the clock that training episodes took, with the time that engines slept. Tools: share of it outside of "
    "the engines. Last of a step: steps of which the longest episode was of this environment."
)


def rollout_tail(rows: Sequence[Mapping[str, Any]], times: Sequence[EpisodeTime]) -> ReportSection:
    """Build the section from the metrics of a run and the times of episodes of whole steps."""
    facts = _facts(rows)
    blocks: list[Block] = [Facts(tuple(facts))] if facts else []
    if times:
        blocks += [Text(TABLE_TEXT), _table(times)]
    return ReportSection("rollout", "Waiting for episodes", tuple(blocks) or (Text("Nothing was recorded of it."),))


def _facts(rows: Sequence[Mapping[str, Any]]) -> list[Fact]:
    facts = []
    if waits := _values(rows, "async/trainer_waits_share"):
        idle = percent(_mean(_values(rows, "async/engines_idle_share")))
        facts.append(Fact("training waits for episodes", percent(_mean(waits)), f"no episode plays for {idle}"))
    if any(groups := _values(rows, "async/unfinished_groups")):
        cut, again = (sum(_values(rows, f"async/{n}")) for n in ("interrupted_episodes", "recomputed_tokens"))
        detail = f"{number(cut)} episodes were interrupted, {number(again)} tokens of their prefixes computed again"
        facts.append(Fact("groups unfinished at an update", f"{_mean(groups):.1f}", detail))
    counts = {name: sum(_values(rows, f"accounting/attempts_{name}")) for name in AGAIN}
    if total := sum(counts.values()):
        details = ", ".join(f"{number(count)} {AGAIN[name]}" for name, count in counts.items() if count)
        facts.append(Fact("episodes played again", number(total), details))
    if any(overtaking := _values(rows, "async/overtaking_share")):
        ratios = _values(rows, "async/length_ratio")
        ends = " → ".join(f"{_mean(part):.2f}" for part in (ratios[:ENDS], ratios[-ENDS:]))
        detail = f"{percent(_mean(overtaking))} of groups overtook others; 1: as long as all that ended"
        facts.append(Fact("length of trained episodes", ends, detail))
    return facts


def _values(rows: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    return [row[name] for row in rows if row.get(name) is not None]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _table(times: Sequence[EpisodeTime]) -> Table:
    by_env: defaultdict[str, list[EpisodeTime]] = defaultdict(list)
    longest: dict[int, EpisodeTime] = {}
    for one in times:
        by_env[one.env].append(one)
        if one.seconds > longest.setdefault(one.step, one).seconds:
            longest[one.step] = one
    last = Counter(one.env for one in longest.values())
    rows = []
    for env in sorted(by_env, key=lambda env: (-last[env], env)):
        seconds = [one.seconds for one in by_env[env]]
        slowest = max(by_env[env], key=lambda one: one.seconds)
        tools = max(0.0, 1 - sum(one.sampling_s for one in by_env[env]) / sum(seconds))
        rows.append(
            (
                Cell(env),
                Cell(f"{last[env]} of {len(longest)}", last[env]),
                *(_seconds(float(np.quantile(seconds, share))) for share in (0.5, 0.9)),
                _seconds(slowest.seconds, f"{slowest.task}, step {slowest.step}"),
                Cell(percent(tools), tools),
                Cell(str(len(seconds)), len(seconds)),
            )
        )
    head = ("environment", "last of a step", "median s", "90 % below", "longest", "tools", "episodes")
    return Table(head, tuple(rows), frozenset(range(1, len(head))))


def _seconds(value: float, title: str = "") -> Cell:
    return Cell(f"{value:.1f}", value, title=title)

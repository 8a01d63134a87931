"""``summary.json``: one small object per run, computed from the metrics log alone, so it is correct after a resume."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from megatron_fleet.algorithms.batch import Fate
from megatron_fleet.storage.local import write_atomically
from megatron_fleet.telemetry.sinks import read_metrics

Row = dict[str, Any]


def write_summary(metrics_path: Path, summary_path: Path, cost_usd: float | None = None) -> dict[str, Any]:
    """Compute the summary, write it atomically and return it. ``cost_usd``: of the run at a service; ``None``: nothing
    is billed, or the prices are not known.
    """
    summary = summarise(read_metrics(metrics_path)) | {"cost_usd": cost_usd}
    write_atomically(summary_path, (json.dumps(summary, indent=2) + "\n").encode())
    return summary


def summarise(rows: Sequence[Row]) -> dict[str, Any]:
    """Summarise a metrics log. Values that cannot be derived from the log are ``None``.

    ``*_before`` is the evaluation at step 0, ``*_after`` the last one after training. Episode and token counts include
    evaluations. ``episodes_by_outcome`` has the collected episodes: those started minus those retried (reward unknown,
    played again) or aborted (lost with an engine or a worker, issued again), plus those that an evaluation's budget
    did not reach.

    ``seconds_total`` is the sum over the attempts of the run, each until its last logged step.
    ``seconds_to_first_step`` is from the start of the attempt to the end of its first training step, including an
    evaluation before it.
    """
    steps = [r for r in rows if "accounting/episodes" in r]
    mismatch = [r["policy/mismatch_kl"] for r in steps if r.get("policy/mismatch_kl") is not None]
    collected = _total(rows, ("accounting/episodes", "eval/all/episodes", "eval/all/greedy_episodes"))
    retried = _total(rows, ("accounting/attempts_retried", "eval/all/attempts_retried"))
    aborted = _total(rows, ("accounting/attempts_aborted", "eval/all/attempts_aborted"))
    unstarted = _total(rows, ("eval/all/attempts_unstarted",))
    return {
        "pass_at_1_before": _first(rows, "eval/all/pass_at_1"),
        "pass_at_1_after": _last(rows, "eval/all/pass_at_1"),
        "greedy_pass_at_1_before": _first(rows, "eval/all/greedy_pass_at_1"),
        "greedy_pass_at_1_after": _last(rows, "eval/all/greedy_pass_at_1"),
        "steps": steps[-1]["step"] if steps else 0,
        "seconds_to_first_step": _since_start(steps[0]) if steps else None,
        "seconds_total": seconds_total(rows),
        "episodes_started": collected - unstarted + retried + aborted,
        "episodes_retried": retried,
        "episodes_aborted": aborted,
        "episodes_by_outcome": _by_suffix(rows, ("generate/outcome/", "eval/all/outcome/", "eval/all/greedy_outcome/")),
        "episodes_by_fate": {str(fate): _total(steps, (f"accounting/{fate}",)) for fate in Fate},
        "tokens_generated": _total(
            rows, ("generate/action_tokens", "eval/all/action_tokens", "eval/all/greedy_action_tokens")
        ),
        "tokens_trained": _total(steps, ("accounting/trained_tokens",)),
        "mismatch_kl": sum(mismatch) / len(mismatch) if mismatch else None,
        "weight_versions": int(_last(rows, "policy/weight_version") or 0),
    }


def seconds_total(rows: Iterable[Row]) -> float:
    """Return the seconds of all attempts, each from its start to its last logged step."""
    attempts = {r.get("attempt"): _since_start(r) for r in rows}  # in order, so the last row of an attempt wins
    return sum(seconds for seconds in attempts.values() if seconds is not None)


def _first(rows: Iterable[Row], name: str) -> float | None:
    return next((r.get(name) for r in rows if r["step"] == 0), None)


def _last(rows: Iterable[Row], name: str) -> float | None:
    return next((r[name] for r in reversed(list(rows)) if r["step"] > 0 and r.get(name) is not None), None)


def _total(rows: Iterable[Row], names: Sequence[str]) -> int:
    return int(sum(r.get(name) or 0 for r in rows for name in names))


def _by_suffix(rows: Iterable[Row], prefixes: tuple[str, ...]) -> dict[str, int]:
    totals: dict[str, int] = {}
    for row in rows:
        for name, value in row.items():
            if name.startswith(prefixes):
                outcome = name.rsplit("/", 1)[1]
                totals[outcome] = totals.get(outcome, 0) + int(value or 0)
    return totals


def _since_start(row: Row) -> float | None:
    """Seconds from the start of the attempt to the end of a row; ``None``: the row, edited since, does not say."""
    time, attempt = row.get("time"), row.get("attempt")
    return None if time is None or attempt is None else time - attempt

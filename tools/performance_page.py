"""Write ``docs/understand/performance.md`` from its template and the results of the benchmarks.

The template, ``tools/performance.md``, has a place such as ``{convert[kimi][plan_seconds]:.0f}`` for every figure, in
the syntax of `str.format`; ``{convert.mark}`` is † when a source that the benchmark measures differs from what it was.
Usage: python tools/performance_page.py
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import fmean, median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "benchmarks"))

from measured import digest  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
TEMPLATE = Path(__file__).with_suffix("").with_name("performance.md")
PAGE = ROOT / "docs" / "understand" / "performance.md"
SHOWN = (
    "checkpoint", "controller", "convert", "counts", "env_concurrency", "logprob_memory", "modes", "offload", "packing",
    "peers", "quickstart", "report", "rollout", "train_step", "two_runs", "verdicts", "weight_sync",
)  # fmt: skip
MARK = " †"


class Result:
    """Result of a benchmark, or several with different arguments, as `str.format` reads it.

    Attributes:
        commit: of the sources that were measured.
        old: one of these sources has changed since.
        mark: of its figures, empty unless they are old.
    """

    def __init__(self, name: str, folder: Path = RESULTS) -> None:
        (path,) = (path for path in folder.glob("*.json") if path.name.partition(".")[0] == name)
        self.values: Any = json.loads(path.read_text(encoding="utf-8"))
        parts = self.values if isinstance(self.values, list) else [self.values]
        now = digest(name)
        self.file, self.commit = path.name, parts[-1]["commit"]
        self.old = any(part["sources"] != now for part in parts)
        self.mark = MARK if self.old else ""

    def __getitem__(self, key: str | int) -> Any:
        return self.values[key]


def page() -> str:
    """Return the page as Markdown."""
    results = {name: Result(name) for name in SHOWN}
    return TEMPLATE.read_text(encoding="utf-8").format(**results, **derived(results))


def derived(results: Mapping[str, Result]) -> dict[str, Any]:
    """Figures and tables that are computed from several values of a result."""
    rollout, modes, packing = (results[name].values for name in ("rollout", "modes", "packing"))
    sync, lag = results["weight_sync"], results["env_concurrency"]["figures"]["loop_lag"]
    controller, front = results["controller"], rollout["cpu_parts_ms_per_turn"]
    host_ms = sorted(each["host_ms_per_micro_batch"] for each in results["train_step"].values)
    sync_s = sync["sync_s" if "sync_s" in sync.values else "publish_s"]  # the name before a verb was renamed
    found: dict[str, Any] = {
        "peers_ratios": ", ".join(f"{ratio:.1f}" for ratio in sorted(results["peers"]["ratios"])),
        "peers_rollout": _ratio(results["peers"], lambda share: share),
        "peers_rest": _ratio(results["peers"], lambda share: 1 - share),
        "rollout_pairs": ", ".join(f"{ratio:.2f}" for ratio in sorted(rollout["ratio_pairs"])),
        "host_ms": f"{host_ms[0]:.2f} to {host_ms[-1]:.2f}",
        "controller_ms": ", ".join(f"{step['cpu_ms_per_step']:.0f}" for step in controller["steps"]),
        "large_s": controller["large"]["cpu_ms_per_step"] / 1e3,
        "socket_ms": front["front_end"] - front["front_end_raw"],
        "lag_server_s": lag["server"]["p99_ms"] / 1e3,
        "lag_worker_s": lag["worker"]["p99_ms"] / 1e3,
        "sync_gb": sync["bytes"] / 1e9,
        "sync_s": median(sync_s),
        "own_s": median(sync["own_s"]),
        "quickstart_rows": quickstart_rows(results["quickstart"].values),
        "speed_rows": speed_rows(modes),
        "packing_rows": packing_rows(packing),
        "logprob_rows": logprob_rows(results["logprob_memory"].values),
        "counts_tables": counts_tables(results["counts"].values),
        "results": "\n".join(map(_state, results.values())),
    }
    fills = {"fill_worst": "fill_by_micro_batch_align", "fill_from_4": "fill_by_micro_batch_align_from_4_per_rank"}
    for name, key in fills.items():
        found[name] = " | ".join(f"{value:.3f}" for value in packing[key].values())
    return found


def _ratio(peers: Result, part: Callable[[float], float]) -> float:
    """Seconds of TRL ÷ ours, of a part of the step. ``part``: its share, from that of the rollout."""
    ours, theirs = (
        figures["seconds_per_episode"] * part(figures["rollout_share"])
        for figures in (peers["sides"]["ours"], peers["sides"]["trl"])
    )
    return float(theirs / ours)


def _state(result: Result) -> str:
    state = "has changed since †" if result.old else "is the same"
    return f"| `benchmarks/results/{result.file}` | {result.commit} | {state} |"


def quickstart_rows(report: Mapping[str, Any]) -> str:
    """A line for each seed."""
    return "\n".join(
        f"| {run['seed']} | {run['before']:.3f} → {run['after']:.3f} | "
        f"{run['greedy'][0]:.2f} → {run['greedy'][1]:.2f} | {run['seconds']} s |"
        for run in report["runs"]
    )


def speed_rows(report: Mapping[str, Any]) -> str:
    """A line for each mode: means over the seeds, and the ratio to the bound of each."""
    lines = []
    waiting = fmean(run["trained_tokens_per_s"] for run in report["speed"] if run["mode"] == "wait")
    for mode in dict.fromkeys(run["mode"] for run in report["speed"]):
        runs = [run for run in report["speed"] if run["mode"] == mode]
        mean = {key: fmean(run[key] for run in runs) for key in ("step_s", "trained_tokens_per_s", "staleness_mean")}
        bounds = ", ".join(f"{run['of_bound']:.2f}" for run in runs)
        again = fmean(run["played_again"] / run["steps"] for run in runs)
        lines.append(
            f"| {mode} | {mean['step_s']:.1f} s | {bounds} | {mean['trained_tokens_per_s'] / waiting:.2f} | "
            f"{mean['staleness_mean']:.2f} | {again:.1f} |"
        )
    return "\n".join(lines)


def packing_rows(report: Mapping[str, Any]) -> str:
    """A line for each number of sequences: worst imbalance by data ranks, with * where no plan is better."""
    cells: dict[int, list[str]] = {}
    for cell in report["grid"]:
        if cell["ranks"] > 1:
            value, forced = cell["imbalance"], cell["least_imbalance"] > 0.03
            text = f"{value:.2f} *" if forced else f"{value:.2f}" if value >= 0.1 else f"{value:.4f}"
            cells.setdefault(cell["sequences"], []).append(text)
    return "\n".join(f"| {count} | {' | '.join(row)} |" for count, row in cells.items())


def logprob_rows(reports: list[Mapping[str, Any]]) -> str:
    """A line for each problem: peak memory by positions, and extrapolated."""
    lines = []
    for report in reports:
        name = f"one rank of TP{report['tensor']}" if report["tensor"] > 1 else f"hidden size {report['hidden']:,}"
        peaks = " | ".join(f"{value:.0f}" for value in report["extra_mb"]["ours"].values())
        goal = report["at_65536_gb"]
        lines.append(f"| {report['dtype']}, {name} | {peaks} | {goal['ours']:.2f} | {goal['plain']:.1f} |")
    return "\n".join(lines)


def counts_tables(report: Mapping[str, Any]) -> str:
    """Messages, kernels and bytes, each beside the least that the algorithm needs."""
    return "\n\n".join([_collectives_table(report), _kernels_table(report), _bytes_table(report)])


def _collectives_table(report: Mapping[str, Any]) -> str:
    lines = ["| layout | part | message | calls | least | size | least | |", "|---|---|---|---|---|---|---|---|"]
    for row in report["collectives"]:
        phase = f", {row['phase']}" if row["where"] in ("layer", "micro-batch") else ""
        size = (f"{row['size']:g} × {row['unit']}", f"{row['minimum_size']:g}") if "unit" in row else ("", "")
        name = row["kind"].replace("_", "-")
        calls = f"{row['calls']:g} | {row['minimum_calls']}"
        cells = f"{row['layout']} | {row['where']}{phase} | {name} | {calls} | {size[0]} | {size[1]}"
        lines.append(f"| {cells} | {row.get('note', '')} |")
    return "\n".join(lines)


def _kernels_table(report: Mapping[str, Any]) -> str:
    lines = ["| layer | forward | least | backward | least | waits |", "|---|---|---|---|---|---|"]
    for row in report["kernels"]:
        least = [row[f"minimum_{phase}"] for phase in ("forward", "backward")]
        waits = row["waits"] + row["waits_by_design"]
        lines.append(f"| {row['layer']} | {row['forward']} | {least[0]} | {row['backward']} | {least[1]} | {waits} |")
    return "\n".join(lines)


def _bytes_table(report: Mapping[str, Any]) -> str:
    moved = report["bytes"]
    data, offload = moved["data"], moved["offload"]
    lines = ["| what | bytes | least | ratio |", "|---|---|---|---|"]
    for row in moved["weight_sync"]:
        given, least = row["bytes"], row["minimum"]
        lines.append(
            f"| Qwen3-8B in {row['dtype']} by {row['transport']} | {given:,} | {least:,} | {given / least:.4f} |"
        )
    what = f"data of a step: {data['tokens']:,} tokens, {data['trained']:,} trained"
    lines.append(f"| {what} | {data['bytes']:,} | {data['minimum']:,} | {data['bytes'] / data['minimum']:.2f} |")
    copied, least = offload["copied"], offload["minimum"]
    lines.append(f"| offload or onload, for each parameter | {copied:g} | {least:g} | {copied / least:.2f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

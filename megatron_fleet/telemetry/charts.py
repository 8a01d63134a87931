"""Line charts of a metrics log as SVG: those of a report, and the learning curve of a run as one file.

Colours come from style variables, so that one drawing works in light and dark mode.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np

from megatron_fleet.config.errors import UserError
from megatron_fleet.storage.local import write_atomically
from megatron_fleet.telemetry.sinks import read_metrics

STYLE = """:root {
  color-scheme: light dark; --card: #fff; --ink: #1b2028; --quiet: #667080; --rule: #dde1e7;
  --c0: #3b6fd4; --c1: #cc4b1f; --c2: #128a74; --c3: #8b4fc0;
  --c4: #a97b00; --c5: #c2317c; --c6: #4a7d1e; --c7: #5b6472;
}
@media (prefers-color-scheme: dark) {
  :root {
    --card: #1a1e25; --ink: #e4e8ee; --quiet: #98a2b1; --rule: #303744;
    --c0: #7ba5ff; --c1: #ff8d63; --c2: #4cc9b0; --c3: #c495f3;
    --c4: #e2b647; --c5: #f57fb8; --c6: #9ccb66; --c7: #aab4c2;
  }
}
.c0 { --c: var(--c0); } .c1 { --c: var(--c1); } .c2 { --c: var(--c2); } .c3 { --c: var(--c3); }
.c4 { --c: var(--c4); } .c5 { --c: var(--c5); } .c6 { --c: var(--c6); } .c7 { --c: var(--c7); }
.plot .grid { stroke: var(--rule); stroke-width: 1; } .plot .tick { fill: var(--quiet); font-size: 11px; }
.plot .resume { stroke: var(--quiet); stroke-dasharray: 3 4; } .plot .cross { stroke: var(--quiet); }
.plot .line polyline { fill: none; stroke: var(--c); stroke-width: 1.8; stroke-linejoin: round; }
.plot .line polyline.raw { stroke-width: 1; opacity: .35; } .plot .line circle { fill: var(--c); }
"""
"""Style of the drawings, for the page or file around them; ``--c`` is the colour of a line and of its label."""
_FILE_STYLE = """svg { font-family: system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; }
.card { fill: var(--card); } .name { fill: var(--ink); font-size: 16px; font-weight: 600; }
.title { fill: var(--ink); font-size: 13px; font-weight: 600; } .label { fill: var(--c); font-size: 12px; }
"""
WIDTH, HEIGHT = 440, 230
LEFT, RIGHT, TOP, BOTTOM = 46, 12, 10, 26
RAW_POINTS = 20
"""A dense line with more points is drawn faint, with its running mean on top."""
LEARNING_CURVE = ("Reward and pass@1", "Policy entropy (nats)", "Gradient norm")

MAX_POINTS = 400
MAX_LINES = 8
"""A chart with more lines (environments) is unreadable; those with the most points, then with the largest change from
first to last value, are kept, and the title says so."""
ENV = "{env}"
_SPARSE = "eval/"
_BARS = "▁▂▃▄▅▆▇█"

# Title, whether the values are shares, metric name → label; `{env}` in a name stands for one line per environment.
CHARTS: tuple[tuple[str, bool, Mapping[str, str]], ...] = (
    (
        "Reward and pass@1",
        True,
        {
            "reward/avg_raw_reward": "training reward",
            "eval/all/pass_at_1": "evaluation, training temperature",
            "eval/all/greedy_pass_at_1": "evaluation, greedy",
        },
    ),
    ("Evaluation pass@1 per environment", True, {"eval/{env}/pass_at_1": ENV}),
    ("Training reward per environment", True, {"reward/{env}/avg_raw_reward": ENV}),
    ("Prompts with signal", True, {"reward/signal_ratio": "all", "reward/{env}/signal_ratio": ENV}),
    ("Policy entropy (nats)", False, {"policy/policy_entropy": "entropy"}),
    (
        "KL divergence (nats)",
        False,
        {"policy/policy_kl": "policy from reference", "policy/mismatch_kl": "engine from trainer"},
    ),
    ("Gradient norm", False, {"policy/grad_norm": "before clipping"}),
    ("Clipped tokens", False, {"policy/ppo_clip_ratio": "share of trained tokens"}),
    ("Generated tokens per second", False, {"generate/tokens_per_second": "tokens/s"}),
    (
        "Seconds per step",
        False,
        {
            "timing/step": "step",
            "timing/generate": "generate",
            "timing/policy_train": "train",
            "timing/sync_weights": "sync",
        },
    ),
    (
        "Failures (share of episodes)",
        False,
        {
            "generate/infrastructure_failure_rate": "infrastructure",
            "generate/verifier_unknown_rate": "verifier",
            "generate/unknown_reward_rate": "reward unknown",
            "environment/no_action_rate": "no action",
        },
    ),
    (
        "Errors and repetition",
        False,
        {
            "environment/tool_error_rate": "tool errors / calls",
            "environment/repeated_call_rate": "repeated calls / calls",
            "environment/parse_error_rate": "unreadable calls / turns",
        },
    ),
    (
        "Turns and tool calls per episode",
        False,
        {"environment/avg_turns": "turns", "environment/avg_tool_calls": "tool calls"},
    ),
    (
        "Tokens per episode",
        False,
        {"generate/avg_tokens_non_zero_rewards": "reward other than 0", "generate/avg_tokens_zero_rewards": "reward 0"},
    ),
    ("Environment mix (share of prompts)", True, {"data/mix/{env}": ENV}),
)


@dataclass(frozen=True, slots=True)
class Series:
    """``points``: step and value, in order of step."""

    label: str
    points: tuple[tuple[float, float], ...]
    sparse: bool = False
    """Few individual points, such as evaluations: drawn with markers."""


@dataclass(frozen=True, slots=True)
class Chart:
    title: str
    series: tuple[Series, ...]
    share: bool = False
    """Values are shares: the axis covers 0 to 1, so that small gains do not look large."""
    marks: tuple[int, ...] = ()
    """Steps at which the run was resumed."""


def charts(rows: Sequence[dict[str, Any]]) -> tuple[Chart, ...]:
    """Return the charts that have at least one value."""
    marks = tuple(resumed_at(rows))
    names = sorted({name for row in rows for name in row})
    found = []
    for title, share, lines in CHARTS:
        series = [s for pattern, label in lines.items() for s in _lines(rows, names, pattern, label)]
        if series:
            kept = _largest(series)
            whole = len(kept) == len(series)
            name = title if whole else f"{title}: {len(kept)} of {len(series)} lines"
            found.append(Chart(name, tuple(kept), share and _within_one(kept), marks))
    return tuple(found)


def thin(points: Sequence[tuple[float, float]], limit: int = MAX_POINTS) -> tuple[tuple[float, float], ...]:
    """Reduce to at most ``limit`` points by averaging consecutive ones."""
    if len(points) <= limit:
        return tuple(points)
    parts = np.array_split(np.array(points, dtype=np.float64), limit)
    return tuple((float(step), float(value)) for step, value in (part.mean(axis=0) for part in parts))


def _lines(rows: Sequence[Mapping[str, Any]], names: Sequence[str], pattern: str, label: str) -> list[Series]:
    regex = re.compile(re.escape(pattern).replace(re.escape(ENV), "([^/]+)"))
    found = []
    for match in filter(None, map(regex.fullmatch, names)):
        env = match[1] if ENV in pattern else ""
        points = [(float(row["step"]), float(row[match[0]])) for row in rows if row.get(match[0]) is not None]
        if points and env != "all":
            found.append(Series(label.replace(ENV, env), thin(points), pattern.startswith(_SPARSE)))
    return found


def _largest(series: list[Series]) -> list[Series]:
    kept = sorted(series, key=lambda s: (-len(s.points), -abs(s.points[-1][1] - s.points[0][1])))[:MAX_LINES]
    return [s for s in series if s in kept]


def _within_one(series: Sequence[Series]) -> bool:
    return all(0 <= value <= 1 for s in series for _, value in s.points)


def resumed_at(rows: Sequence[dict[str, Any]]) -> list[int]:
    """Return the first step logged by each attempt after the first one."""
    attempts = [(row["step"], row.get("attempt")) for row in rows]
    return [step for (_, old), (step, new) in pairwise(attempts) if old != new]


def draw(chart: Chart) -> str:
    """Return the chart as an ``svg`` element; ``data-chart`` has the values that the page's script shows on hover."""
    return ElementTree.tostring(_plot(chart), encoding="unicode")


def write_learning_curve(metrics_path: Path, path: Path, title: str) -> None:
    """Draw reward and held-out pass@1 above, entropy and gradient norm below, into one SVG file.

    Raises:
        UserError: the log has no step to draw.
    """
    rows = read_metrics(metrics_path)
    if not rows:
        raise UserError(f"{metrics_path} holds no step, so there is no curve to draw; run `mfleet train` first")
    found = {chart.title: chart for chart in charts(rows)}
    write_svg(path, title, [found[name] for name in LEARNING_CURVE if name in found])


def write_svg(path: Path, title: str, drawn: Sequence[Chart]) -> None:
    """Write a file with the first chart over the whole width and the others below, two beside each other."""
    width = 2 * WIDTH
    root = ElementTree.Element("svg", {"xmlns": "http://www.w3.org/2000/svg", "width": str(width)})
    ElementTree.SubElement(root, "style").text = STYLE + _FILE_STYLE
    ElementTree.SubElement(root, "rect", {"class": "card", "width": "100%", "height": "100%"})
    _write(root, "name", 12, 24, title)
    bottom = 36
    for first in (0, *range(1, len(drawn), 2)):
        row = drawn[first : first + (2 if first else 1)]
        size = (WIDTH, HEIGHT) if first else (width, 2 * HEIGHT - 100)
        top = bottom + 14 * max((len(chart.series) for chart in row), default=0) + 14
        for column, chart in enumerate(row):
            x = column * WIDTH
            _write(root, "title", x + 12, bottom + 12, chart.title)
            for number, series in enumerate(chart.series):
                ends = f": {series.points[0][1]:.2f} → {series.points[-1][1]:.2f}" if series.sparse else ""
                _write(root, f"label c{number % 8}", x + LEFT, bottom + 14 * (number + 2), series.label + ends)
            plot = _plot(chart, *size)
            plot.attrib |= {"x": str(x), "y": str(top), "width": str(size[0]), "height": str(size[1])}
            del plot.attrib["data-chart"]
            root.append(plot)
        bottom = top + size[1] + 10
    root.attrib |= {"height": str(bottom), "viewBox": f"0 0 {width} {bottom}"}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, ElementTree.tostring(root))


def _plot(chart: Chart, width: int = WIDTH, height: int = HEIGHT) -> ElementTree.Element:
    scale = Scale(chart, width, height)
    root = ElementTree.Element(
        "svg", {"viewBox": f"0 0 {width} {height}", "role": "img", "aria-label": chart.title, "class": "plot"}
    )
    _axes(root, scale)
    for mark in chart.marks:
        x = _text(scale.x(mark))
        line = ElementTree.SubElement(root, "line", {"class": "resume", "x1": x, "x2": x})
        line.attrib |= {"y1": str(TOP), "y2": str(height - BOTTOM)}
        ElementTree.SubElement(line, "title").text = f"resumed before step {mark}"
    for number, series in enumerate(chart.series):
        _line(root, series, scale, number)
    root.set("data-chart", json.dumps(_readable(chart, scale)))
    return root


def _write(root: ElementTree.Element, name: str, x: int, y: int, text: str) -> None:
    ElementTree.SubElement(root, "text", {"class": name, "x": str(x), "y": str(y)}).text = text


def sparkline(values: Sequence[float], width: int) -> str:
    """Draw values as at most ``width`` bars of text, scaled from the lowest to the highest; equal ones are low."""
    if len(values) > width:
        values = [values[round(i * (len(values) - 1) / (width - 1))] for i in range(width)]
    low, high = min(values), max(values)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((value - low) * scale)] for value in values)


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Return about ``count`` round numbers in ``[low, high]``, 1, 2, 2.5 or 5 times a power of ten apart."""
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


class Scale:
    """Mapping from values to drawing coordinates."""

    def __init__(self, chart: Chart, width: int, height: int) -> None:
        steps = [x for s in chart.series for x, _ in s.points]
        margin = 0.5 if min(steps) == max(steps) else 0.0
        self.x_low, self.x_high = min(steps) - margin, max(steps) + margin
        self.y_low, self.y_high = _range(chart)
        self.right, self.bottom = width - RIGHT, height - BOTTOM

    def x(self, value: float) -> float:
        return LEFT + (value - self.x_low) / (self.x_high - self.x_low) * (self.right - LEFT)

    def y(self, value: float) -> float:
        return self.bottom - (value - self.y_low) / (self.y_high - self.y_low) * (self.bottom - TOP)


def _range(chart: Chart) -> tuple[float, float]:
    values = [y for s in chart.series for _, y in s.points]
    if chart.share:
        return 0.0, 1.0
    low, high = min(0.0, *values), max(0.0, *values)
    return (low, high) if high - low > 1e-300 else (low, low + 1.0)


def _axes(root: ElementTree.Element, scale: Scale) -> None:
    for value in ticks(scale.y_low, scale.y_high):
        y = _text(scale.y(value))
        ElementTree.SubElement(root, "line", {"class": "grid", "x1": str(LEFT), "x2": str(scale.right)}).attrib |= {
            "y1": y,
            "y2": y,
        }
        label = ElementTree.SubElement(root, "text", {"class": "tick", "x": str(LEFT - 6), "y": y, "dy": "0.32em"})
        label.set("text-anchor", "end")
        label.text = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    whole = [value for value in ticks(scale.x_low, scale.x_high, 6) if float(value).is_integer()]
    for value in whole:
        label = ElementTree.SubElement(root, "text", {"class": "tick", "x": _text(scale.x(value))})
        label.attrib |= {"y": str(scale.bottom + BOTTOM - 8), "text-anchor": "middle"}
        label.text = f"{value:.0f}"


def _line(root: ElementTree.Element, series: Series, scale: Scale, number: int) -> None:
    group = ElementTree.SubElement(root, "g", {"class": f"line c{number % 8}"})
    values = [y for _, y in series.points]
    raw = [(scale.x(x), scale.y(y)) for x, y in series.points]
    if series.sparse or len(raw) == 1:
        for x, y in raw:
            ElementTree.SubElement(group, "circle", {"cx": _text(x), "cy": _text(y), "r": "3.4"})
    dense = len(raw) > RAW_POINTS and not series.sparse
    if len(raw) > 1:
        _polyline(group, raw, "raw" if dense else "")
    if dense:
        means = running_means(values)
        _polyline(group, [(x, scale.y(mean)) for (x, _), mean in zip(raw, means, strict=True)], "")


def running_means(values: Sequence[float]) -> list[float]:
    """Return for each value the mean of the latest ones up to it, a twentieth of all and at least five."""
    window = max(5, len(values) // 20)
    parts = (values[max(0, i - window + 1) : i + 1] for i in range(len(values)))
    return [sum(part) / len(part) for part in parts]


def _polyline(group: ElementTree.Element, points: Sequence[tuple[float, float]], name: str) -> None:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    ElementTree.SubElement(group, "polyline", {"points": path} | ({"class": name} if name else {}))


def _readable(chart: Chart, scale: Scale) -> dict[str, object]:
    lines = [
        [[round(scale.x(x), 1), x if not float(x).is_integer() else int(x), float(f"{y:.4g}")] for x, y in s.points]
        for s in chart.series
    ]
    return {"labels": [s.label for s in chart.series], "lines": lines, "top": TOP, "bottom": scale.bottom}


def _text(value: float) -> str:
    return f"{value:.1f}"

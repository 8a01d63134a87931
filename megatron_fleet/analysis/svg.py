"""Line charts as SVG with colours taken from the page, so that one drawing works in light and dark mode."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from xml.etree import ElementTree

from megatron_fleet.analysis.document import Chart, Series

WIDTH, HEIGHT = 440, 230
LEFT, RIGHT, TOP, BOTTOM = 46, 12, 10, 26
RAW_POINTS = 40
"""A dense line with more points is drawn faint, with its running mean on top."""


def draw(chart: Chart) -> str:
    """Return the chart as an ``svg`` element; ``data-chart`` has the values that the page's script shows on hover."""
    steps = [x for s in chart.series for x, _ in s.points]
    low, high = _range(chart)
    x_low, x_high = min(steps), max(steps)
    if x_low == x_high:
        x_low, x_high = x_low - 0.5, x_high + 0.5
    scale = _Scale(x_low, x_high, low, high)
    root = ElementTree.Element(
        "svg", {"viewBox": f"0 0 {WIDTH} {HEIGHT}", "role": "img", "aria-label": chart.title, "class": "plot"}
    )
    _axes(root, scale)
    for mark in chart.marks:
        x = _text(scale.x(mark))
        line = ElementTree.SubElement(root, "line", {"class": "resume", "x1": x, "x2": x})
        line.attrib |= {"y1": str(TOP), "y2": str(HEIGHT - BOTTOM)}
        ElementTree.SubElement(line, "title").text = f"resumed before step {mark}"
    for number, series in enumerate(chart.series):
        _line(root, series, scale, number)
    root.set("data-chart", json.dumps(_readable(chart, scale)))
    return ElementTree.tostring(root, encoding="unicode")


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Return about ``count`` round numbers in ``[low, high]``, 1, 2, 2.5 or 5 times a power of ten apart."""
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


class _Scale:
    """Mapping from values to drawing coordinates."""

    def __init__(self, x_low: float, x_high: float, y_low: float, y_high: float) -> None:
        self.x_low, self.x_high, self.y_low, self.y_high = x_low, x_high, y_low, y_high

    def x(self, value: float) -> float:
        return LEFT + (value - self.x_low) / (self.x_high - self.x_low) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (value - self.y_low) / (self.y_high - self.y_low) * (HEIGHT - TOP - BOTTOM)


def _range(chart: Chart) -> tuple[float, float]:
    values = [y for s in chart.series for _, y in s.points]
    if chart.share:
        return 0.0, 1.0
    low, high = min(0.0, *values), max(0.0, *values)
    return (low, high) if high - low > 1e-300 else (low, low + 1.0)


def _axes(root: ElementTree.Element, scale: _Scale) -> None:
    for value in ticks(scale.y_low, scale.y_high):
        y = _text(scale.y(value))
        ElementTree.SubElement(root, "line", {"class": "grid", "x1": str(LEFT), "x2": str(WIDTH - RIGHT)}).attrib |= {
            "y1": y,
            "y2": y,
        }
        label = ElementTree.SubElement(root, "text", {"class": "tick", "x": str(LEFT - 6), "y": y, "dy": "0.32em"})
        label.set("text-anchor", "end")
        label.text = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    whole = [value for value in ticks(scale.x_low, scale.x_high, 6) if float(value).is_integer()]
    for value in whole:
        label = ElementTree.SubElement(root, "text", {"class": "tick", "x": _text(scale.x(value))})
        label.attrib |= {"y": str(HEIGHT - 8), "text-anchor": "middle"}
        label.text = f"{value:.0f}"


def _line(root: ElementTree.Element, series: Series, scale: _Scale, number: int) -> None:
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
        window = max(3, len(values) // 20)
        means = [
            scale.y(sum(part) / len(part))
            for part in (values[max(0, i - window + 1) : i + 1] for i in range(len(values)))
        ]
        _polyline(group, [(x, mean) for (x, _), mean in zip(raw, means, strict=True)], "")


def _polyline(group: ElementTree.Element, points: Sequence[tuple[float, float]], name: str) -> None:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    ElementTree.SubElement(group, "polyline", {"points": path} | ({"class": name} if name else {}))


def _readable(chart: Chart, scale: _Scale) -> dict[str, object]:
    lines = [
        [[round(scale.x(x), 1), x if not float(x).is_integer() else int(x), float(f"{y:.4g}")] for x, y in s.points]
        for s in chart.series
    ]
    return {"labels": [s.label for s in chart.series], "lines": lines, "top": TOP, "bottom": HEIGHT - BOTTOM}


def _text(value: float) -> str:
    return f"{value:.1f}"

"""Drawing of a chart as a PNG file, for places that show no SVG."""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING

from megatron_fleet.telemetry.charts import LEFT, RAW_POINTS, STYLE, TOP, Chart, Scale, Series, running_means, ticks

if TYPE_CHECKING:
    from PIL.ImageDraw import ImageDraw

WIDTH, HEIGHT = 760, 340
ENLARGED = 2
"""Device pixels per unit of the drawing, for screens of high density."""
SMOOTHED = 2
"""Further enlargement while drawing; scaling down smooths the lines."""
LINE_HEIGHT = 18
MARGIN = 12


def chart_png(title: str, chart: Chart) -> bytes:
    """Draw a chart with its title and the label of each line above."""
    from PIL import Image, ImageDraw

    factor, head = ENLARGED * SMOOTHED, 2 * MARGIN + LINE_HEIGHT * (1 + len(chart.series))
    colours = _colours()
    image = Image.new("RGB", (WIDTH * factor, (head + HEIGHT) * factor), colours["card"])
    pen = _Pen(ImageDraw.Draw(image), factor)
    pen.text((MARGIN, MARGIN + LINE_HEIGHT / 2), title, colours["ink"], 16, "lm")
    for number, series in enumerate(chart.series):
        y = MARGIN + LINE_HEIGHT * (number + 1.6)
        colour = colours[f"c{number % 8}"]
        pen.line([(LEFT, y), (LEFT + 14, y)], colour, 3)
        pen.text((LEFT + 20, y), series.label + _ends(series), colours["ink"], 12, "lm")
    _plot(pen, chart, Scale(chart, WIDTH, HEIGHT), head, colours)
    small = image.resize((WIDTH * ENLARGED, (head + HEIGHT) * ENLARGED), Image.Resampling.LANCZOS)
    written = io.BytesIO()
    small.quantize(64).save(written, "PNG")
    return written.getvalue()


class _Pen:
    """Drawing in units of the chart, which are ``factor`` pixels."""

    def __init__(self, draw: ImageDraw, factor: int) -> None:
        self._draw, self._factor = draw, factor

    def line(self, points: list[tuple[float, float]], colour: str, width: float) -> None:
        places = [(x * self._factor, y * self._factor) for x, y in points]
        self._draw.line(places, colour, round(width * self._factor), joint="curve")

    def dot(self, x: float, y: float, radius: float, colour: str) -> None:
        box = [(v * self._factor) for v in (x - radius, y - radius, x + radius, y + radius)]
        self._draw.ellipse(box, colour)

    def text(self, at: tuple[float, float], text: str, colour: str, size: int, anchor: str) -> None:
        from PIL import ImageFont

        font = ImageFont.load_default(size * self._factor)
        shown = "".join(c if c.isprintable() and ord(c) < 0x250 else "?" for c in text)[:120]  # of the font's letters
        self._draw.text((at[0] * self._factor, at[1] * self._factor), shown, colour, font, anchor)


def _plot(pen: _Pen, chart: Chart, scale: Scale, head: int, colours: dict[str, str]) -> None:
    for value in ticks(scale.y_low, scale.y_high):
        y = head + scale.y(value)
        pen.line([(LEFT, y), (scale.right, y)], colours["rule"], 1)
        shown = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
        pen.text((LEFT - 6, y), shown, colours["quiet"], 11, "rm")
    for value in ticks(scale.x_low, scale.x_high, 6):
        if float(value).is_integer():
            pen.text((scale.x(value), head + scale.bottom + 14), f"{value:.0f}", colours["quiet"], 11, "mm")
    for mark in chart.marks:
        x = scale.x(mark)
        for y in range(TOP, int(scale.bottom), 7):
            pen.line([(x, head + y), (x, head + y + 3)], colours["quiet"], 1)
    for number, series in enumerate(chart.series):
        points = [(scale.x(x), head + scale.y(y)) for x, y in series.points]
        colour = colours[f"c{number % 8}"]
        if series.sparse or len(points) == 1:
            for x, y in points:
                pen.dot(x, y, 3.4, colour)
        dense = len(points) > RAW_POINTS and not series.sparse
        if len(points) > 1:
            pen.line(points, _faint(colour, colours["card"]) if dense else colour, 1 if dense else 1.8)
        if dense:
            means = running_means([y for _, y in points])
            pen.line([(x, mean) for (x, _), mean in zip(points, means, strict=True)], colour, 1.8)


def _ends(series: Series) -> str:
    first, last = series.points[0][1], series.points[-1][1]
    return f": {last:.2f}" if len(series.points) == 1 else f": {first:.2f} to {last:.2f}"


def _colours() -> dict[str, str]:
    """Colours of the light style by the names of its variables."""
    light = STYLE[: STYLE.index("@media")]
    return dict(re.findall(r"--(\w+): (#\w+)", light))


def _faint(colour: str, ground: str) -> str:
    """Mix a colour with the ground, as an opacity of 35 % does."""
    parts = [[int(hexadecimal[i : i + 2], 16) for i in (1, 3, 5)] for hexadecimal in (colour, _long(ground))]
    return "#" + "".join(f"{round(0.35 * a + 0.65 * b):02x}" for a, b in zip(*parts, strict=True))


def _long(colour: str) -> str:
    return colour if len(colour) == 7 else "#" + "".join(2 * c for c in colour[1:])

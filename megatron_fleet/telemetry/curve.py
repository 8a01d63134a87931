"""Learning curve of a run as one image, drawn from its metrics log."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_fleet.config.errors import UserError
from megatron_fleet.telemetry.sinks import read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TRAIN, SAMPLED, GREEDY, MUTED = "#4477aa", "#cc3311", "#009988", "#777777"
"""Colour-blind safe (Paul Tol's palette)."""

HELD_OUT = (
    ("eval/all/pass_at_1", "held-out pass@1, training temperature", SAMPLED, "s"),
    ("eval/all/greedy_pass_at_1", "held-out pass@1, greedy", GREEDY, "D"),
)

Rows = list[dict[str, Any]]


def draw_learning_curve(metrics_path: Path, png_path: Path, title: str) -> None:
    """Draw train reward and held-out pass@1 above, entropy and gradient norm below; needs no display.

    Raises:
        UserError: the log has no step to draw.
    """
    import matplotlib.pyplot as plt  # imported here because it takes half a second
    from matplotlib.figure import Figure

    rows = read_metrics(metrics_path)
    if not rows:
        raise UserError(f"{metrics_path}: holds no step, so there is no curve to draw; run `mfleet train` first")
    with plt.style.context("default"):
        figure = Figure(figsize=(9, 7), dpi=150, layout="constrained")
        grid = figure.add_gridspec(2, 2, height_ratios=(2.2, 1))
        reward = figure.add_subplot(grid[0, :])
        _draw_reward(reward, rows)
        figure.suptitle(title, x=0.02, ha="left", fontweight="bold")
        _draw_series(figure.add_subplot(grid[1, 0]), rows, "policy/policy_entropy", "policy entropy (nats)")
        _draw_series(figure.add_subplot(grid[1, 1]), rows, "policy/grad_norm", "gradient norm")
        for axes in figure.axes:
            _style(axes, rows[-1]["step"])
        png_path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(png_path)


def series(rows: Rows, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return steps and values of one metric, where it has a value."""
    points = [(r["step"], r[name]) for r in rows if r.get(name) is not None]
    steps, values = zip(*points, strict=True) if points else ((), ())
    return np.array(steps), np.array(values, dtype=np.float64)


def running_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Return the mean of the latest ``window`` values at every position, of fewer at the beginning."""
    sums = np.cumsum(np.concatenate([[0.0], values]))
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - window, 0)
    return (sums[ends] - sums[starts]) / (ends - starts)


def _draw_reward(axes: Axes, rows: Rows) -> None:
    steps, values = series(rows, "reward/avg_raw_reward")
    if len(steps):
        axes.plot(steps, values, "o", color=TRAIN, alpha=0.4, markersize=4, markeredgewidth=0)
        window = max(1, min(5, len(steps) // 4))
        label = f"train reward (mean of {window} steps)" if window > 1 else "train reward"
        axes.plot(steps, running_mean(values, window), color=TRAIN, linewidth=1.8, label=label)
    curves = [(*series(rows, name), label, colour, marker) for name, label, colour, marker in HELD_OUT]
    for steps, values, label, colour, marker in curves:
        if len(steps):
            axes.plot(steps, values, marker=marker, color=colour, linestyle="--", linewidth=1.2, label=label)
    for i in (0, -1):
        points = [(steps[i], values[i], colour) for steps, values, _, colour, _ in curves if len(steps)]
        # Higher label above its point, lower one below, so that close points stay readable.
        for rank, (step, value, colour) in enumerate(sorted(points, key=lambda point: -point[1])):
            axes.annotate(
                f"{value:.2f}",
                (step, value),
                xytext=(0, 7 if rank == 0 else -15),
                textcoords="offset points",
                ha="center",
                color=colour,
                fontweight="bold",
            )
    axes.set_ylabel("reward / pass@1")
    shown = np.concatenate([series(rows, name)[1] for name in ("reward/avg_raw_reward", *(h[0] for h in HELD_OUT))])
    if len(shown) and shown.min() >= 0 and shown.max() <= 1:
        axes.set_ylim(-0.05, 1.08)  # the whole scale, so that small gains do not look large
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=3, fontsize=9, borderaxespad=0.2)


def _draw_series(axes: Axes, rows: Rows, name: str, label: str) -> None:
    steps, values = series(rows, name)
    axes.plot(steps, values, color=MUTED, linewidth=1.4)
    axes.set_title(label, loc="left", fontsize=10)
    axes.set_ylim(bottom=0)


def _style(axes: Axes, last_step: int) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel("training step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlim(-0.03 * max(last_step, 1), 1.03 * max(last_step, 1))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)

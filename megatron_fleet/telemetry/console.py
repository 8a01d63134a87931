"""Progress display of a run: live on a terminal, plain lines for its start and each step elsewhere."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, TextIO

from megatron_fleet.config.errors import say
from megatron_fleet.telemetry.charts import sparkline

if TYPE_CHECKING:
    from rich.console import RenderableType

SHOWN = (
    ("reward", "reward/avg_raw_reward", "{:.3f}"),
    ("pass@1", "reward/pass_at_1", "{:.3f}"),
    ("held-out pass@1", "eval/all/pass_at_1", "{:.3f}"),
    ("greedy", "eval/all/greedy_pass_at_1", "{:.3f}"),
    ("tokens/s", "generate/tokens_per_second", "{:,.0f}"),
    ("entropy", "policy/policy_entropy", "{:.3f}"),
    ("grad norm", "policy/grad_norm", "{:.3g}"),
    ("mismatch KL", "policy/mismatch_kl", "{:.1e}"),
    ("cost", "cost/cumulative_usd", "${:,.2f}"),
)
SPARK_WIDTH = 32
ETA_STEPS = 10
"""Number of latest steps whose mean duration gives the estimate of the remaining time."""


def duration(seconds: float) -> str:
    """Format the two largest units: ``7 min 41 s``, ``3 h 12 min``, ``2 d 4 h``."""
    whole = round(seconds)
    for name, size, smaller, part in (("d", 86400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if whole >= size:
            return f"{whole // size} {name} {whole % size // part} {smaller}"
    return f"{whole} s"


def step_text(metrics: Mapping[str, float]) -> str:
    """Format the key metrics that are present: ``reward 0.412 · pass@1 0.412``."""
    return " · ".join(f"{label} {form.format(metrics[name])}" for label, name, form in SHOWN if name in metrics)


class RunProgress:
    """Display of the run's current phase and latest metrics. Used by one thread; a context manager."""

    def __init__(self, name: str, steps: int, done: int = 0, stream: TextIO | None = None) -> None:
        """``steps``: of the whole run; ``done``: completed before this attempt; ``stream`` defaults to stdout."""
        self._name, self._steps, self._done = name, steps, done
        self._stream = stream or sys.stdout
        self._phase, self._phase_total, self._phase_done = "starting", 0, 0
        self._phase_started = self._step_started = time.monotonic()
        self._durations: deque[float] = deque(maxlen=ETA_STEPS)
        self._rewards: deque[float] = deque(maxlen=SPARK_WIDTH)
        self._last: dict[str, float] = {}
        self._live = None
        if self._stream.isatty():
            from rich.console import Console
            from rich.live import Live

            console = Console(file=self._stream)
            self._live = Live(get_renderable=self._render, console=console, refresh_per_second=4)
            self._live.start()
        count = f"{steps} step{'s' * (steps != 1)}"
        self._line(f"{name}: resuming after step {done} of {count}" if done else f"{name}: starting a run of {count}")

    def __enter__(self) -> RunProgress:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def phase(self, name: str, total: int = 0) -> None:
        """Begin a phase of the step with ``total`` units of work, 0 = not countable."""
        self._phase, self._phase_total, self._phase_done = name, total, 0
        self._phase_started = time.monotonic()

    def advance(self, n: int = 1) -> None:
        """Advance the phase by ``n`` units."""
        self._phase_done += n

    def step_done(self, metrics: Mapping[str, float]) -> None:
        """Record the end of a training step with its metrics."""
        now = time.monotonic()
        self._durations.append(now - self._step_started)
        self._step_started = now
        self._done += 1
        if "reward/avg_raw_reward" in metrics:
            self._rewards.append(metrics["reward/avg_raw_reward"])
        # Evaluation metrics stay on screen until the next evaluation; all others are of this step or absent.
        self._last = {k: v for k, v in self._last.items() if k.startswith("eval/")} | dict(metrics)
        self._line(f"step {self._done}/{self._steps} · {step_text(metrics)} · {self._pace()}")

    def evaluated(self, step: int, metrics: Mapping[str, float], in_step: bool = False) -> None:
        """Record the end of an evaluation of the weights of ``step``; ``in_step`` is false outside training steps, such
        as before training.
        """
        self._last |= metrics
        if not in_step:
            self._step_started = time.monotonic()
        self._line(f"evaluation after step {step} · {step_text(metrics)}")

    def close(self) -> None:
        """Stop, leaving the last state on the terminal. Idempotent."""
        if self._live:
            self._phase, self._phase_total = "done", 0
            self._live.stop()
            self._live = None

    def _line(self, text: str) -> None:
        if not self._live:
            say(text, self._stream)

    def _pace(self) -> str:
        mean = sum(self._durations) / len(self._durations)
        left = max(self._steps - self._done, 0)
        return f"{duration(self._durations[-1])} · ETA {duration(mean * left)}"

    def _render(self) -> RenderableType:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        head = Text.assemble((self._name, "bold"), f"  step {self._done}/{self._steps}")
        if self._durations:
            head.append(f"  {self._pace()}", style="dim")
        phase = Table.grid(padding=(0, 1))
        elapsed = duration(time.monotonic() - self._phase_started)
        if self._phase_total:
            bar = ProgressBar(total=self._phase_total, completed=self._phase_done, width=30)
            phase.add_row(self._phase, bar, f"{self._phase_done}/{self._phase_total}", Text(elapsed, style="dim"))
        else:
            phase.add_row(self._phase, Text(elapsed, style="dim"))
        parts: list[RenderableType] = [head, phase]
        if self._last:
            parts.append(Text(step_text(self._last), style="cyan"))
        if self._rewards:
            parts.append(Text.assemble(("reward ", "dim"), (sparkline(list(self._rewards), SPARK_WIDTH), "green")))
        return Group(*parts)

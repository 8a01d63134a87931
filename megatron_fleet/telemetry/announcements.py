"""Announcements of a run in Slack: its start, first step, evaluations, alerts and end, in one thread."""

from __future__ import annotations

import os
import re
import socket
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from megatron_fleet.config.errors import UserError, printable
from megatron_fleet.config.secrets import redacted
from megatron_fleet.platform.alerts import Alert, AlertHandler, Kind, listening
from megatron_fleet.telemetry.chart_png import chart_png
from megatron_fleet.telemetry.charts import LEARNING_CURVE, Chart, charts
from megatron_fleet.telemetry.console import duration, step_text
from megatron_fleet.telemetry.sinks import read_metrics
from megatron_fleet.telemetry.slack import THREAD, Message, SlackThread, escape

if TYPE_CHECKING:
    from megatron_fleet.config.schema import Config

ALERTS: Mapping[Kind, str] = {
    "tool_errors": "tool errors",
    "mismatch": "engines and trainer differ",
    "no_signal": "no learning signal",
    "throughput": "slower",
    "disk": "disk nearly full",
    "stall": "stalled",
    "outage": "environment outage",
    "update": "unusual update",
    "restart": "lost and restarted",
    "checkpoint": "no checkpoint",
}
SHOWN_ENVIRONMENTS = 20
LAST_LINES, LINES_CHARACTERS = 15, 2000
ERROR_CHARACTERS = 800
REQUEUE = os.EX_TEMPFAIL
_LOGS = re.compile(r"\S+/logs(/[\w.-]+\.log)?")
_JOBS = {"SLURM_JOB_ID": "Slurm job", "SKYPILOT_TASK_ID": "SkyPilot task"}
_SCORE = re.compile(r"eval/([^/]+)/pass_at_1")


@contextmanager
def announced(config: Config) -> Iterator[Announcements]:
    """Announcements of one attempt; an error in the block is announced, and raised.

    Raises:
        UserError: the token is missing.
    """
    slack = config.logging.slack
    thread = None if slack.channel is None else SlackThread(slack, os.environ, Path(config.run.out) / THREAD)
    found = Announcements(config, thread)
    try:
        with listening(AlertHandler(found.alert, slack.cooldown_s)):
            yield found
        if found.status is not None:
            found.ended()
    except BaseException as error:
        found.failed(error)
        raise
    finally:
        if thread is not None:
            thread.close()


@final
class Announcements:
    """What Slack hears of one attempt, and sink for the metrics it needs. Without a channel nothing is said.

    No method waits for Slack, except `began`.

    Attributes:
        status: exit status of the run; ``None``: it has not ended.
    """

    def __init__(self, config: Config, thread: SlackThread | None) -> None:
        self._config, self._thread = config, thread
        self._began = time.time()
        self.status: int | None = None
        self._step = 0
        self._first = True
        self._rows: list[dict[str, Any]] = []
        self._stopped_by = ""

    def began(self, resumed_step: int | None) -> None:
        """Announce the start, and wait a few seconds until Slack has accepted it.

        Raises:
            UserError: Slack refuses, for example because the app is not in the channel.
        """
        if self._thread is None:
            return
        config, run = self._config, self._config.run
        self._step = resumed_step or 0
        if resumed_step is not None:
            rows = read_metrics(Path(run.out) / "metrics.jsonl")
            self._rows = [_kept(row) for row in rows if row["step"] <= resumed_step]
        jobs = [f"*{label}:* {escape(os.environ[name])}" for name, label in _JOBS.items() if os.environ.get(name)]
        tasks = f"{config.data.tasks} ({config.data.modality})" if config.data.tasks else config.data.modality
        lines = [
            f"*Model:* {escape(str(config.model.path))}",
            f"*Tasks:* {escape(tasks)}",
            f"*Steps:* {run.last_step}" + (f", resumes after step {resumed_step}" if resumed_step is not None else ""),
            f"*Host:* {escape(socket.gethostname())}",
            *jobs,
            f"*Outputs:* `{escape(str(Path(run.out).absolute()))}`",
            *_tracker(config),
        ]
        what = "started" if resumed_step is None else "resumed"
        self._thread.open(Message(f":rocket: {run.id} {what}", "\n".join(lines), lasting=True))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the metrics of a step or an evaluation."""
        if self._thread is None:
            return
        row = _kept({"step": step, "attempt": self._began, **metrics})
        older = [r for r in self._rows if r["step"] <= step]
        if older and older[-1]["step"] == step:
            row = older.pop() | row
        # A restarted trainer goes back to a checkpoint; an evaluation may end after newer steps (eval.engines).
        newer = [] if "accounting/episodes" in metrics else [r for r in self._rows if r["step"] > step]
        self._rows = [*older, row, *newer]
        if "accounting/episodes" in metrics:
            self._step = step
            if self._first:
                self._first = False
                self._first_step(step, metrics)
        if "eval/all/episodes" in metrics:
            self._evaluation(step, row)

    def close(self, complete: bool = True) -> None:
        """Do nothing: the announcements of this process go on with its next attempt."""

    def alert(self, alert: Alert) -> None:
        """Announce an alert."""
        subject = f": {alert.subject}" if alert.subject else ""
        self._say(f":warning: {ALERTS[alert.kind]}{subject}", escape(alert.text))

    def stopping(self, reason: str) -> None:
        """Announce that the run was asked to end, at once: it may be killed while it saves."""
        self._stopped_by = reason
        self._say(f":octagonal_sign: stopping: {reason}", "Work in progress is saved or abandoned.", lasting=True)

    def ended(self) -> None:
        """Announce the end according to `status`."""
        took = duration(time.time() - self._began)
        if self.status == 0:
            curve = self._curve()
            text = f"{self._step} steps, {took} in this attempt.\n{_change(self._rows)}"
            self._say(":white_check_mark: completed", text, lasting=True, curve=curve)
        elif self.status == REQUEUE:
            text = (
                f"Saved after step {self._step}, stopped by {escape(self._stopped_by)}; the same command resumes the "
                f"run."
            )
            self._say(":double_vertical_bar: will resume", text, lasting=True)
        else:
            by = f" by {escape(self._stopped_by)}" if self._stopped_by else ""
            text = f"Stopped after step {self._step}{by}; the same command resumes from the newest checkpoint."
            self._say(":octagonal_sign: cancelled", text, lasting=True)

    def failed(self, error: BaseException) -> None:
        """Announce the failure that ends the run, with the last lines that say something about it."""
        if isinstance(error, KeyboardInterrupt):
            self.status = 130
            self.ended()
            return
        said = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        lines = _block(last_lines(error))
        text = f"After step {self._step}: {_plain(said)[:ERROR_CHARACTERS]}"
        self._say(":x: failed", f"{text}\n{lines}" if lines else text, lasting=True)

    def _first_step(self, step: int, metrics: Mapping[str, float]) -> None:
        seconds = metrics.get("timing/step", 0.0)
        left = self._config.run.last_step - step
        pace = f"{duration(seconds)} per step, about {duration(seconds * left)} for the {left} that are left"
        self._say(
            f":white_check_mark: step {step} of {self._config.run.last_step} done", f"{step_text(metrics)}\n{pace}"
        )

    def _evaluation(self, step: int, row: Mapping[str, Any]) -> None:
        lines = [_change(self._rows), _block(_environments(self._rows, row))]
        text = "\n".join(line for line in lines if line)
        self._say(f":chart_with_upwards_trend: evaluation after step {step}", text, curve=self._curve())

    def _curve(self) -> Chart | None:
        return next((chart for chart in charts(self._rows) if chart.title == LEARNING_CURVE[0]), None)

    def _say(self, title: str, text: str, lasting: bool = False, curve: Chart | None = None) -> None:
        if self._thread is None:
            return
        name = self._config.run.id or self._config.run.name
        draw = None if curve is None else lambda: chart_png(name, curve)
        self._thread.put(Message(title, text, draw, lasting))


def last_lines(error: BaseException) -> str:
    """Return the end of the log that an error names (of a folder of logs: of the one that was written to last), or of
    its traceback; an error of the user's has none."""
    if (named := _LOGS.search(str(error))) is not None:
        path = Path(named[0])
        try:
            if path.is_dir():
                path = max(path.glob("*.log"), key=lambda log: log.stat().st_mtime)
            with path.open("rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - 4 * LINES_CHARACTERS))
                return file.read().decode(errors="replace")
        except (OSError, ValueError):
            pass  # expected: it is on another host, or there is none
    return "" if isinstance(error, UserError) else "".join(traceback.format_exception(error))


def _block(text: str) -> str:
    """Return the last lines of ``text`` as a code block."""
    lines = [printable(line) for line in text.strip("\n").splitlines()][-max(LAST_LINES, SHOWN_ENVIRONMENTS + 2) :]
    whole = "\n".join(lines)[-LINES_CHARACTERS:]
    return f"```{_plain(whole, lines=True)}```" if whole else ""


def _plain(text: str, lines: bool = False) -> str:
    """Escape a text that may hold anything; nothing in it ends a code block, and no secret of ours is in it."""
    text = redacted(text if lines else printable(text))
    return escape(text.replace("```", "'''"))


def _kept(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return those values of a row of metrics that later announcements need."""
    needed = ("step", "attempt", "reward/avg_raw_reward", "eval/all/greedy_pass_at_1")
    return {name: value for name, value in row.items() if name in needed or _SCORE.fullmatch(name)}


def _change(rows: list[dict[str, Any]]) -> str:
    """Describe the held-out results: the first and the last."""
    parts = []
    for label, name in (("pass@1", "eval/all/pass_at_1"), ("greedy", "eval/all/greedy_pass_at_1")):
        values = [row[name] for row in rows if row.get(name) is not None]
        if values:
            before = f"{values[0]:.3f} → " if len(values) > 1 else ""
            parts.append(f"{label} {before}{values[-1]:.3f}")
    return "Held-out " + ", ".join(parts) if parts else "No held-out episode has a known reward."


def _environments(rows: list[dict[str, Any]], last: Mapping[str, Any]) -> str:
    """Make a table of the environments in the last evaluation, the lowest pass@1 first."""
    found = []
    for name, value in last.items():
        match = _SCORE.fullmatch(name)
        if match and match[1] != "all" and value is not None:
            first = next(row[name] for row in rows if row.get(name) is not None)
            found.append((value, match[1], value - first))
    shown = [f"{value:.3f} {change:+.3f}  {env[:60]}" for value, env, change in sorted(found)[:SHOWN_ENVIRONMENTS]]
    more = [f"and {len(found) - len(shown)} more"] if len(found) > len(shown) else []
    return "\n".join(["pass@1 change  environment", *shown, *more]) if len(found) > 1 else ""


def _tracker(config: Config) -> list[str]:
    """Lines with the address of the run at Weights & Biases, where attempts are a group with the run's id."""
    wandb = config.logging.wandb
    if wandb.project is None:
        return []
    if wandb.mode == "offline" or wandb.entity is None:
        return [f"*W&amp;B:* {escape(wandb.project)}, group {escape(str(config.run.id))}"]
    base = os.environ.get("WANDB_BASE_URL", "https://wandb.ai").rstrip("/")
    return [f"*W&amp;B:* {escape(f'{base}/{wandb.entity}/{wandb.project}/groups/{config.run.id}')}"]

"""Rules that raise an alert when the metrics of a training step are bad."""

from __future__ import annotations

import logging
import re
import shutil
import statistics
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, final

from megatron_fleet.config.units import size
from megatron_fleet.platform.alerts import Kind, alert

if TYPE_CHECKING:
    from megatron_fleet.config.schema import Config

log = logging.getLogger(__name__)

SIGNAL_STEPS = 3
"""Consecutive steps without a prompt whose rewards differ, from which on there is no learning signal."""
RATE_WINDOW = 32
"""Number of latest steps whose median tokens per second are the reference of a drop."""
RATE_RECENT = 3
"""Number of latest steps whose median is compared with that; a single slow step is no alert."""
RATE_FEWEST = 8
"""Minimum number of steps for the reference."""
CHECKPOINTS_OF_ROOM = 2
FLOOR_BYTES = 10**9
"""Free disk space below which there is an alert: this, or the newest checkpoint's size times the number above."""
_TOOL_ERRORS = re.compile(r"environment/([^/]+)/tool_error_rate")
_BREAKER = re.compile(r"environment/([^/]+)/breaker_open")


@final
class AlertRules:
    """Sink for metrics that raises an alert when those of a training step are bad."""

    def __init__(self, config: Config) -> None:
        self._config, self._out = config, Path(config.run.out)
        self._without_signal = 0
        self._rates: dict[str, deque[float]] = {}
        self._newest: tuple[Path | None, int] = None, 0

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Judge the metrics of ``step``; those of evaluations pass."""
        if "accounting/episodes" not in metrics:
            return
        for kind, subject, text in self._problems(metrics):
            alert(log, kind, f"step {step}: {text}", subject)

    def close(self, complete: bool = True) -> None:
        """Do nothing. The window goes on with the next attempt of this process."""

    def _problems(self, metrics: Mapping[str, float]) -> Iterator[tuple[Kind, str, str]]:
        limit = self._config.logging.alerts.tool_error_rate if self._config.env.about.tools else None
        for name, value in sorted(metrics.items()):
            if limit is not None and (found := _TOOL_ERRORS.fullmatch(name)) and value > limit:
                yield (
                    "tool_errors",
                    found[1],
                    f"{value:.0%} of the tool calls of environment {found[1]} failed "
                    f"(logging.alerts.tool_error_rate={limit:g}); see `mfleet report`, Errors.",
                )
            if (found := _BREAKER.fullmatch(name)) and value:
                yield (
                    "outage",
                    found[1],
                    f"environment {found[1]} is in quarantine, because its last episodes failed through its own fault "
                    f"(env.provisioning.breaker_threshold); it is tried again after env.provisioning.breaker_pause_s.",
                )
        if problem := mismatch_problem(self._config, metrics):
            yield "mismatch", "", problem
        if problem := self._signal(metrics):
            yield "no_signal", "", problem
        for name, rate in _rates(metrics).items():
            if problem := self._drop(name, rate):
                yield "throughput", name, problem
        if problem := self._disk():
            yield "disk", "", problem

    def _signal(self, metrics: Mapping[str, float]) -> str | None:
        self._without_signal = 0 if metrics.get("reward/signal_ratio") else self._without_signal + 1
        if self._without_signal < SIGNAL_STEPS:
            return None
        mean = metrics.get("reward/avg_raw_reward")
        known = "no reward is known" if mean is None else f"the mean reward is {mean:.3g}"
        return (
            f"no learning signal for {self._without_signal} steps: within each prompt all known rewards are equal, and "
            f"{known}; the tasks are too easy or too hard, or their verifiers fail."
        )

    def _drop(self, name: str, rate: float) -> str | None:
        """Compare the latest rates with those before; a lower level becomes the reference in time."""
        share = self._config.logging.alerts.throughput
        rates = self._rates.setdefault(name, deque(maxlen=RATE_WINDOW + RATE_RECENT))
        rates.append(rate)
        before, recent = list(rates)[:-RATE_RECENT], list(rates)[-RATE_RECENT:]
        if share is None or len(before) < RATE_FEWEST:
            return None
        usual, now = statistics.median(before), statistics.median(recent)
        if now >= share * usual:
            return None
        return (
            f"{name} dropped to {now:,.0f} tokens per second, {now / usual:.0%} of the median of the "
            f"{len(before)} steps before (logging.alerts.throughput={share:g})."
        )

    def _disk(self) -> str | None:
        """Return a warning when the disk of ``run.out`` has little room for the next checkpoints."""
        newest = max(self._out.glob("checkpoints/step_*"), default=None, key=lambda path: path.name)
        try:
            if newest is not None and newest != self._newest[0]:
                self._newest = newest, sum(file.stat().st_size for file in newest.rglob("*"))
            free = shutil.disk_usage(self._out).free
        except OSError:  # expected: retention removes a checkpoint at any moment
            return None
        needed = self._newest[1]
        if free >= max(FLOOR_BYTES, CHECKPOINTS_OF_ROOM * needed):
            return None
        last = f", and the newest checkpoint takes {size(needed)}" if needed else ""
        return f"{self._out}: the disk has {size(free)} left{last}; free some space."


def _rates(metrics: Mapping[str, float]) -> dict[str, float]:
    """Tokens per second by what they measure; a step without an update has none of training."""
    found = {}
    if "generate/tokens_per_second" in metrics:
        found["generation"] = metrics["generate/tokens_per_second"]
    trained, seconds = metrics.get("accounting/trained_tokens"), metrics.get("timing/policy_train")
    if trained and seconds:
        found["training"] = trained / seconds
    return found


def mismatch_problem(config: Config, metrics: Mapping[str, float]) -> str | None:
    """Return a warning when the engines sample from too different a policy, with what may cause it; else ``None``.

    Args:
        metrics: of a training step.
    """
    limit, kl = config.policy.safety.mismatch_kl, metrics.get("policy/mismatch_kl")
    if limit is not None and (unknown := metrics.get("policy/mismatch_unknown_tokens")):
        return (
            f"policy/mismatch_unknown_tokens={unknown:g}: the engines or the trainer gave log-probs that are NaN; with "
            f"algorithm.correction.kind other than off these tokens are not trained on; check the engines' formats."
        )
    if limit is None or kl is None or kl <= limit:
        return None
    engine, recipe = config.rollout.engine, config.precision.recipe
    causes = []
    if config.precision.fp8 != engine.fp8(recipe):
        causes.append(f"precision.recipe={recipe} with rollout.engine.quantization={engine.quantization}")
    if engine.kv_cache_dtype == "fp8":
        causes.append("rollout.engine.kv_cache_dtype=fp8")
    if config.rollout.max_staleness:
        causes.append(f"rollout.max_staleness={config.rollout.max_staleness}")
    cause = f"maybe for {', '.join(causes)}" if causes else "and their formats are the same"
    return (
        f"policy/mismatch_kl={kl:.3g} is above policy.safety.mismatch_kl={limit:g}: the engines sample from another "
        f"policy than is trained, {cause}; compare policy/probe_difference (rollout.engine.probe_interval), and see "
        f"algorithm.correction.kind."
    )

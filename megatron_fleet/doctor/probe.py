"""Probe: one question about this host or a service, and its answer; many are asked at the same time."""

from __future__ import annotations

import logging
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from megatron_fleet.cluster.inventory import Host
from megatron_fleet.cluster.launcher import die_with_parent
from megatron_fleet.config.errors import UserError
from megatron_fleet.config.schema import Config

Status = Literal["ok", "warning", "failed", "skipped"]
NOT_NEEDED = "only for "
"""Beginning of the detail of a probe that this run does not need."""
MEASURED_S = 20.0
"""Deadline of a probe that has no other one."""


@dataclass(frozen=True, slots=True)
class Result:
    """Answer of a probe.

    Attributes:
        status: ``failed``: a run of this configuration would not work here; ``warning``: it would, worse;
            ``skipped``: nobody asked, for the reason in ``detail``.
        detail: what was seen.
        fix: what to do about it; empty when nothing is to be done.
    """

    status: Status
    detail: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class ProbeContext:
    """Host and configuration that a probe examines.

    Attributes:
        config: of the run that is to be started; ``None``: this machine alone is looked at.
        environ: environment variables of this process.
        host: this host with its devices.
        quick: leave out what takes long: the content of the model's files, an engine, an environment.
        met: this host has met others at MFLEET_CONTROLLER, whose port is therefore in use.
    """

    config: Config | None
    environ: Mapping[str, str]
    host: Host
    quick: bool = False
    met: bool = False

    @property
    def folder(self) -> Path:
        """The run's folder of outputs, or the nearest one above it that exists."""
        out = Path("." if self.config is None else self.config.run.out).absolute()
        return next(path for path in (out, *out.parents) if path.is_dir())


def always(here: ProbeContext) -> bool:
    """Every run needs it."""
    return True


def with_devices(here: ProbeContext) -> bool:
    """Runs on GPUs need it."""
    return bool(here.host.devices)


def with_config(here: ProbeContext) -> bool:
    """Every run needs it, whose configuration is known."""
    return here.config is not None


@dataclass(frozen=True, slots=True)
class Probe:
    """One question.

    Attributes:
        name: as in the first column of the table.
        run: asks it. UserError is a failure, and a warning in the log of the project a warning.
        needs: whether a run needs that the answer is good; else ``run`` is not called.
        of: the runs that need it, for those who are not asked.
        deadline_s: no answer after these seconds is a failure.
        slow: asked when the quick ones have answered, because it loads the machine; left out with
            ``ProbeContext.quick``.
    """

    name: str
    run: Callable[[ProbeContext], Result]
    needs: Callable[[ProbeContext], bool] = always
    of: str = ""
    deadline_s: float = MEASURED_S
    slow: bool = False


@dataclass(frozen=True, slots=True)
class Finding:
    """Answer of the probe ``name`` on one host after ``seconds``."""

    name: str
    host: str
    result: Result
    seconds: float = 0.0


def ask(probes: Sequence[Probe], here: ProbeContext) -> list[Finding]:
    """Ask the quick probes at the same time, then the slow ones one by one; the findings are in the order of probes."""
    quick = [probe for probe in probes if not probe.slow]
    asked: dict[str, Finding] = {}
    for together in (quick, *([probe] for probe in probes if probe.slow)):
        running = [_Question(probe, here) for probe in together]
        for question in running:
            question.start()
        asked |= {question.probe.name: question.answer() for question in running}
    return [asked[probe.name] for probe in probes]


class _Question:
    """A probe that is asked in a thread. One that does not answer, as a disk that hangs, is left behind."""

    def __init__(self, probe: Probe, here: ProbeContext) -> None:
        self.probe, self._here = probe, here
        self._result: Result | None = None
        self._began = self._took = 0.0
        self._thread = threading.Thread(target=self._ask, name=f"doctor: {probe.name}", daemon=True)

    def start(self) -> None:
        self._began = time.monotonic()
        self._thread.start()

    def answer(self) -> Finding:
        self._thread.join(max(0.0, self._began + self.probe.deadline_s - time.monotonic()))
        result = self._result or Result(
            "failed",
            f"no answer within {self.probe.deadline_s:g} s",
            "find the process that hangs, and run the command again",
        )
        return Finding(self.probe.name, self._here.host.name, result, self._took or self.probe.deadline_s)

    def _ask(self) -> None:
        probe, here = self.probe, self._here
        if not probe.needs(here):
            result = Result("skipped", f"{NOT_NEEDED}{probe.of}")
        elif probe.slow and here.quick:
            result = Result("skipped", "left out by --quick")
        else:
            result = _guarded(probe, here)
        self._took = max(time.monotonic() - self._began, 1e-6)
        self._result = result


def _guarded(probe: Probe, here: ProbeContext) -> Result:
    with warnings_of_this_thread() as warnings:
        try:
            result = probe.run(here)
        except UserError as error:
            return Result("failed", *split_advice(str(error)))
        except Exception as error:  # a defect of the probe must not hide the other answers
            return Result("failed", f"{type(error).__name__}: {error}", "report this as a defect of mfleet doctor")
    if warnings and result.status == "ok":
        return Result("warning", *split_advice("; ".join(warnings)))
    return result


def split_advice(text: str) -> tuple[str, str]:
    """Split an error message, ``problem; what to do.``, into its two parts; the second may be empty."""
    problem, semicolon, advice = text.rstrip(".").rpartition("; ")
    return (problem, advice) if semicolon else (advice, "")


@contextmanager
def warnings_of_this_thread() -> Iterator[list[str]]:
    """Collect what the project's modules warn of in this thread meanwhile, instead of printing it."""
    handler = _Collector()
    logger = logging.getLogger("megatron_fleet")
    logger.addHandler(handler)
    try:
        yield handler.found
    finally:
        logger.removeHandler(handler)


@dataclass(eq=False)
class _Collector(logging.Handler):
    found: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(logging.WARNING)
        self._thread = threading.get_ident()

    def emit(self, record: logging.LogRecord) -> None:
        if record.thread == self._thread:
            self.found.append(record.getMessage())


def output(command: Sequence[str | Path], environ: Mapping[str, str], timeout_s: float, stdin: str = "") -> str:
    """Run a program to its end and return its output.

    Raises:
        UserError: it cannot be started, does not end in time, or fails; the message has its last line.
    """
    name = Path(command[0]).name
    try:
        done = subprocess.run(
            [str(part) for part in command],
            env=dict(environ),
            input=stdin,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
            preexec_fn=die_with_parent(),
        )
    except FileNotFoundError:
        raise UserError(f"there is no program {command[0]}; install it.") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"probe {name} failed: {error}.") from None
    if done.returncode:
        lines = f"{done.stdout}\n{done.stderr}".strip().splitlines() or [f"status {done.returncode}"]
        raise UserError(f"{name} failed: {lines[-1].strip().rstrip('.').removeprefix('error: ')}.")
    return done.stdout

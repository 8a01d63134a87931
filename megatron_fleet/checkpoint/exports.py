"""Exports of checkpoints as HF folders while training goes on.

What is to be done follows from what lies in the run's folder, so an interrupted export is done again by the next
attempt: each step that the configuration wants is converted, checked if that is asked for, and copied to the store. The
work is that of ``mfleet convert to-hf`` and ``mfleet convert check``, in processes of their own at the lowest priority.
An export takes its name by one rename; on a store its ``config.json`` comes last.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal, NamedTuple, final

from megatron_fleet.checkpoint.checkpoints import SUPERSEDED, Checkpoint, Checkpoints, kept_besides
from megatron_fleet.checkpoint.manifest import MANIFEST
from megatron_fleet.checkpoint.store import Replaced, RunStore, Uploader
from megatron_fleet.cluster.inventory import cuda_is_installed
from megatron_fleet.cluster.launcher import last_line, spawn
from megatron_fleet.config.errors import UserError
from megatron_fleet.config.files import read_object
from megatron_fleet.config.schema import Config
from megatron_fleet.config.secrets import without_secrets
from megatron_fleet.config.sections.run import ExportConfig
from megatron_fleet.convert.check import Result, copy_probe
from megatron_fleet.convert.plan import CHECKPOINT
from megatron_fleet.platform.alerts import alert
from megatron_fleet.storage.local import UNFINISHED, LocalFolder, remove_folder, rename_folder
from megatron_fleet.storage.open import open_folder, open_staging
from megatron_fleet.storage.transfer import Copy, transfer
from megatron_fleet.telemetry.sinks import read_metrics
from megatron_fleet.weights.hf_folder import JOURNAL, ORIGIN

log = logging.getLogger(__name__)

FOLDER, LAST = "exports", "hf"
"""Below ``run.out`` and below the run's address in the store: exports of single steps, and of the last one."""
MARKER = "config.json"
"""File of an HF folder that comes last."""
ATTEMPTS = 3
"""Attempts at each piece of work; the next one is made when another checkpoint is there, or at the end."""
WORKERS = 4
"""Threads of a conversion: it need not be fast, it must leave the disk to the run."""
LOWEST_PRIORITY = 19
POLL_S = 0.1
PROBE_FILE, REPORT_FILE = ".probe.json", ".check.json"
"""Suffixes of files beside an export."""
ADAPTERS = "adapter_config.json"
"""Marks an export of adapters alone, which vLLM does not load without their model."""


class Job(NamedTuple):
    """A piece of work. ``step``: ``None`` = of `LAST`."""

    kind: Literal["convert", "check", "upload"]
    step: int | None


def wanted(steps: Sequence[int], settings: ExportConfig, scores: Mapping[int, float]) -> set[int]:
    """Steps whose exports are to be in ``run.out``: the newest that are due, and the best.

    Args:
        steps: of all checkpoints and exports.
        scores: by step, of ``checkpoint.keep_best``.
    """
    due = [step for step in sorted(set(steps)) if settings.every and step % settings.every == 0]
    return set(due[-settings.keep :]) | (kept_besides(steps, 0, scores) if settings.best else set())


class ExportFailed(Exception):
    """A process of an export failed; the message says how."""


@final
class Exports:
    """Thread that does what is to be done for the exports of a run, one piece of work after the other."""

    def __init__(
        self, config: Config, checkpoints: Checkpoints, store: RunStore | None, program: Sequence[str] = ()
    ) -> None:
        """Begin with what an earlier attempt left.

        Args:
            store: the run's; ``None``: none.
            program: command line in place of ``mfleet``.
        """
        self._config, self._checkpoints, self._store = config, checkpoints, store
        self._settings, self._out = config.checkpoint.export, Path(config.run.out)
        self._program = list(program or (sys.executable, "-m", "megatron_fleet.cli"))
        self._devices_are_free = not cuda_is_installed()
        self._changed = threading.Condition()
        self._wanted: set[int] = set()
        self._tried: dict[Job, int] = {}
        self._resting: set[Job] = set()
        self._uploaded: set[int | None] = set()
        self._ended = self._busy = self._over = False
        self._stop = threading.Event()
        self._converted = self._failures = 0
        self._seconds = 0.0
        self._result: Result | None = None
        self._process: subprocess.Popen[bytes] | None = None
        checkpoints.in_use = self.needed
        self.refresh()
        self._thread = threading.Thread(target=self._run, name="exports", daemon=True)
        self._thread.start()

    def refresh(self) -> None:
        """Decide anew what is to be exported, because there is a new checkpoint; call it in a thread."""
        try:
            self._decide()
        except (UserError, OSError) as error:
            alert(log, "checkpoint", f"the checkpoints to export could not be determined: {error}", "export")

    def _decide(self) -> None:
        metric = self._config.checkpoint.keep_best if self._settings.best else None
        rows = [] if metric is None else read_metrics(self._out / "metrics.jsonl")
        scores = {row["step"]: row[str(metric)] for row in rows if row.get(str(metric)) is not None}
        steps = [checkpoint.step for checkpoint in self._checkpoints.committed()]
        with self._changed:
            self._wanted = wanted([*steps, *self._exported()], self._settings, scores)
            self._resting.clear()
            self._changed.notify_all()

    def needed(self) -> set[int]:
        """Steps whose checkpoints in ``run.out`` are still to be read."""
        with self._changed:
            try:
                return {step for job in self._left() if job.kind == "convert" and (step := job.step) is not None}
            except OSError:  # a disk that fails must not fail the save that asks
                return set(self._wanted)

    def metrics(self) -> dict[str, float]:
        """Counts since this attempt began; seconds and difference of the newest."""
        with self._changed:
            found: dict[str, float] = {
                "checkpoint/exports": self._converted,
                "checkpoint/exports_failed": self._failures,
                "checkpoint/export_seconds": self._seconds,
            }
            if self._result is not None:
                found["checkpoint/export_difference"] = self._result.mean
            with suppress(OSError):
                found["checkpoint/exports_waiting"] = len({job.step for job in self._left()})
            return found

    def finish(self, timeout_s: float) -> None:
        """Do everything that is left, the export of the last step included, at most for ``timeout_s``.

        Training is over: devices and engines are free.
        """
        deadline, last = time.monotonic() + timeout_s, self._checkpoints.path_of(self._config.run.last_step)
        self._forget(None)
        if self._settings.check and last.exists() and (self.path_of(None) / MARKER).is_file():
            copy_probe(last, self._probe_of(None))
        with self._changed:
            self._ended = self._devices_are_free = True
            if self._process is not None and self._process.returncode is None:
                _set_priority(self._process, os.getpriority(os.PRIO_PROCESS, 0))
            self._resting.clear()
            if self._left():
                log.info("waiting for exports: %s", ", ".join(sorted({_name(job.step) for job in self._left()})))
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: self._over or not (self._busy or self._todo()), max(0.0, deadline - time.monotonic())
            )
            if left := {_name(job.step) for job in self._left()}:
                log.warning("exports are not finished: %s; the same command resumes them", ", ".join(sorted(left)))

    def close(self) -> None:
        """Abandon what is under way. Idempotent."""
        self._stop.set()
        with self._changed:
            self._changed.notify_all()
        self._thread.join()

    def path_of(self, step: int | None) -> Path:
        """Folder of the export of a step, or of the last one."""
        return self._out / (LAST if step is None else f"{FOLDER}/step_{step:06d}")

    def _exported(self) -> list[int]:
        """Steps of the whole exports, those of checkpoints left out that another one of the same step has replaced."""
        found = [path.parent for path in (self._out / FOLDER).glob(f"step_*/{MARKER}")]
        steps = sorted(int(path.name[5:]) for path in found if path.name[5:].isdecimal())
        checkpoints = {step: self._checkpoints.path_of(step) for step in steps}
        return [s for s in steps if not checkpoints[s].exists() or _is_of(self.path_of(s), checkpoints[s])]

    def _left(self) -> list[Job]:
        """Everything that is still to be done and was not given up, in order."""
        here: list[int | None] = [*self._exported()]
        found = [Job("convert", step) for step in sorted(self._wanted) if step not in here]
        if self._ended and self._settings.last and _marker(self.path_of(None)) is not None:
            here.append(None)
        for step in here:
            unchecked = self._probe_of(step).exists() and not self._report_of(step).exists()
            if self._settings.check and unchecked and step in {*self._wanted, None}:
                found.append(Job("check", step))
            if self._store is not None and step not in self._uploaded and not self._is_bad(step):
                found.append(Job("upload", step))
        return [job for job in found if self._tried.get(job, 0) < ATTEMPTS]

    def _todo(self) -> Job | None:
        """What can be done now; what remains of an export that is there comes before the next conversion."""
        now = [job for job in self._left() if job not in self._resting]
        now = [job for job in now if job.kind != "check" or self._devices_are_free]
        return next(iter(sorted(now, key=lambda job: job.kind == "convert")), None)

    def _run(self) -> None:
        try:
            self._work()
        finally:
            with self._changed:
                self._over = True
                self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._stop.is_set() or self._todo())
                job = self._todo()
                if self._stop.is_set() or job is None:
                    return
                self._busy = True
                self._tried[job] = self._tried.get(job, 0) + 1
            try:
                {"convert": self._convert, "check": self._check, "upload": self._upload}[job.kind](job.step)
                self._prune()
            except (CancelledError, Replaced):
                return  # the uploader of the checkpoints tells who replaced this attempt
            except Exception as error:  # whatever it is, it must not end training
                self._fail(job, error)

    def _fail(self, job: Job, error: Exception) -> None:
        verb = {"convert": "exported", "check": "checked", "upload": "copied to the store"}[job.kind]
        text = f"{self.path_of(job.step)} was not {verb}: {error}"
        alert(log, "checkpoint", text, "export")
        with self._changed:
            self._failures += 1
            self._resting.add(job)

    def _convert(self, step: int | None) -> None:
        assert step is not None
        began, out, checkpoint = time.monotonic(), self.path_of(step), self._checkpoints.path_of(step)
        out.parent.mkdir(exist_ok=True)
        for place in (out, out.with_name(f".{out.name}{UNFINISHED}")):
            if place.exists() and not _is_of(place, checkpoint):
                remove_folder(place)
        self._forget(step)
        if self._settings.check and not copy_probe(checkpoint, self._probe_of(step)):
            log.warning("%s holds no log-probs to compare with, so its export is not checked", checkpoint)
        workers = str(min(WORKERS, len(os.sched_getaffinity(0))))
        template = self._config.model.folder
        self._call("to-hf", str(checkpoint), str(out), "--template", template, "--workers", workers)
        with self._changed:
            self._converted, self._seconds = self._converted + 1, time.monotonic() - began
        log.info("step %d is exported to %s", step, out)

    def _check(self, step: int | None) -> None:
        """Compare an export with what the trainer computed.

        Raises:
            ExportFailed: they differ too much, or could not be compared.
        """
        engine, report = self._config.rollout.engine, self._report_of(step)
        tolerance = engine.probe_tolerance
        options = ("--tensor-parallel", str(engine.tensor_parallel), "--tolerance", str(tolerance))
        try:
            self._call("check", str(self.path_of(step)), str(self._probe_of(step)), *options, "--write", str(report))
        except ExportFailed:
            if not report.exists():
                raise
        result = Result.read(report)
        with self._changed:
            self._result = result
        if self._is_bad(step):
            raise ExportFailed(
                f"vLLM's log-probs differ by {result.mean:.3g} nats on average from the trainer's; "
                f"more than rollout.engine.probe_tolerance={tolerance:g}"
            )

    def _is_bad(self, step: int | None) -> bool:
        """Whether a check found another model."""
        report = self._report_of(step)
        try:
            return report.exists() and not Result.read(report).mean <= self._config.rollout.engine.probe_tolerance
        except UserError:  # it is damaged: not known to be good
            return True

    def _upload(self, step: int | None) -> None:
        assert self._store is not None
        source, checkpoint = self.path_of(step), self._checkpoints.path_of(step or self._config.run.last_step)
        fingerprint = _fingerprint(checkpoint) if checkpoint.exists() else _journal(source).get(CHECKPOINT)
        name = LAST if step is None else f"{FOLDER}/global_step_{step}"
        upload(self._store, name, source, {"run": self._config.run.id, CHECKPOINT: fingerprint}, self._stop)
        with self._changed:
            self._uploaded.add(step)

    def _call(self, *arguments: str) -> None:
        """Run ``mfleet convert …``, at the lowest priority while training goes on. It dies with this process.

        Raises:
            ExportFailed: it failed; the message is its last line.
            CancelledError: `close` was called, and killed it.
        """
        logs = self._out / "logs"
        logs.mkdir(exist_ok=True)
        family = self._config.model.family
        environment = without_secrets(os.environ)
        if arguments[0] != "check":
            environment["CUDA_VISIBLE_DEVICES"] = ""
        own = ("--family", family) if family else ()
        process = spawn([*self._program, "convert", *arguments, *own], environment, logs / "exports.log")
        with self._changed:
            self._process = process
            if not self._ended:
                _set_priority(process, LOWEST_PRIORITY)
        while process.poll() is None:
            if self._stop.wait(POLL_S):
                os.killpg(process.pid, signal.SIGKILL)  # with what it started; its id is not free before `wait`
                process.wait()
                raise CancelledError
        if process.returncode:
            raise ExportFailed(_how_ended(process, logs / "exports.log"))

    def _prune(self) -> None:
        """Remove exports that are no longer wanted and need no more work, once those that are wanted are there."""
        with self._changed:
            left = self._left()
            if any(job.kind == "convert" for job in left):
                return
            unwanted = set(self._exported()) - self._wanted - {job.step for job in left}
        for step in unwanted:
            remove_folder(self.path_of(step))
            self._forget(step)

    def _forget(self, step: int | None) -> None:
        """Remove what is known of an export."""
        self._probe_of(step).unlink(missing_ok=True)
        self._report_of(step).unlink(missing_ok=True)
        with self._changed:
            self._uploaded.discard(step)

    def _probe_of(self, step: int | None) -> Path:
        """File with the trainer's log-probs: a check may come when the checkpoint is gone."""
        return _beside(self.path_of(step), PROBE_FILE)

    def _report_of(self, step: int | None) -> Path:
        """File with the result of a check."""
        return _beside(self.path_of(step), REPORT_FILE)


@contextmanager
def open_exports(
    config: Config, checkpoints: Checkpoints, uploader: Uploader | None, found: Checkpoint | None
) -> Iterator[Exports | None]:
    """Exports of a run, or ``None`` where nothing is to be exported beside the training loop.

    Args:
        found: checkpoint from which the run goes on; exports of later steps no longer count.
    """
    settings = config.checkpoint.export
    in_background = settings.every > 0 or settings.best
    if not in_background and not (settings.last and (settings.check or uploader is not None)):
        yield None
        return
    set_later_aside(Path(config.run.out) / FOLDER, 0 if found is None else found.step)
    exports = Exports(config, checkpoints, None if uploader is None else uploader.store)
    try:
        yield exports
    finally:
        exports.close()


def set_later_aside(folder: Path, step: int) -> None:
    """Rename exports of steps after ``step`` to ``<name>.superseded``: they no longer count."""
    for path in folder.glob("step_*"):
        if path.is_dir() and path.name[5:].isdecimal() and int(path.name[5:]) > step:
            rename_folder(path, f"{path.name}{SUPERSEDED}")
            for suffix in (PROBE_FILE, REPORT_FILE):
                _beside(path, suffix).unlink(missing_ok=True)
            log.warning("%s no longer counts and is now %s%s", path, path.name, SUPERSEDED)


def upload(store: RunStore, name: str, source: Path, origin: Mapping[str, object], stop: threading.Event) -> None:
    """Copy an export to ``name`` below a run's address, its ``config.json`` last.

    Files that an earlier, interrupted call has finished are not copied again; what another checkpoint left there is
    replaced.

    Raises:
        Replaced: see `RunStore.check_attempt`.
        CancelledError: ``stop`` was set.
        UserError: the store refuses.
    """
    url = f"{store.url}/{name}"
    marker = _marker(source) or MARKER
    staging, final = open_staging(url, marker), open_folder(url)
    note = (json.dumps(origin, sort_keys=True) + "\n").encode()
    store.check_attempt()
    if staging.exists():
        if ORIGIN in final.sizes() and final.read(ORIGIN) == note:
            return
        final.clear(marker)
    there = staging.folder.sizes()
    if ORIGIN not in there or staging.folder.read(ORIGIN) != note:
        there = {}
        staging.folder.write(ORIGIN, note)
    folder = LocalFolder(source)
    sizes = {file: size for file, size in folder.sizes().items() if file not in (marker, ORIGIN)}
    missing = [Copy(file, file, size) for file, size in sizes.items() if there.get(file) != size]
    transfer(folder, staging.folder, missing, store.throttle, stop)
    for file in staging.folder.sizes().keys() - sizes.keys() - {ORIGIN}:  # of an export that was given up
        staging.folder.delete(file)
    store.check_attempt()
    staging.commit(folder.read(marker))


def _marker(export: Path) -> str | None:
    """File that comes last in a whole export; ``None``: there is none."""
    return next((name for name in (MARKER, ADAPTERS) if (export / name).is_file()), None)


def _beside(export: Path, suffix: str) -> Path:
    return export.with_name(f"{export.name}{suffix}")


def _is_of(export: Path, checkpoint: Path) -> bool:
    """Whether an export, finished or not, is of this checkpoint: another one may have been of the same step."""
    try:
        return _journal(export).get(CHECKPOINT) == _fingerprint(checkpoint)
    except FileNotFoundError:  # the checkpoint was removed meanwhile
        return True


def _journal(export: Path) -> dict[str, object]:
    try:
        return read_object(export / JOURNAL)
    except UserError:
        return {}


def _fingerprint(checkpoint: Path) -> str:
    return hashlib.sha256((checkpoint / MANIFEST).read_bytes()).hexdigest()


def _set_priority(process: subprocess.Popen[bytes], nice: int) -> None:
    """Set the priority of all threads of a process. Only root may raise it."""
    with suppress(OSError):  # it has ended, or this is not permitted
        os.setpriority(os.PRIO_PGRP, process.pid, nice)


def _name(step: int | None) -> str:
    return LAST if step is None else str(step)


def _how_ended(process: subprocess.Popen[bytes], path: Path) -> str:
    status = process.returncode
    how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
    return f"its process {how} ({last_line(path)}); see {path}"

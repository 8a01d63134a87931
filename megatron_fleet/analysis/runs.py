"""Runs in local folders and in stores: what there is, how far each is, how two differ, what can be removed."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from megatron_fleet.analysis.fleet_layout import AGGREGATED, parse_rows
from megatron_fleet.analysis.run_files import (
    FLEET_EVALUATIONS,
    FLEET_TRAINING,
    RESULT,
    TRAJECTORIES,
    RunFiles,
    is_evaluation,
    is_run,
)
from megatron_fleet.checkpoint.checkpoints import RECORDS, Checkpoint, Checkpoints
from megatron_fleet.checkpoint.manifest import MANIFEST
from megatron_fleet.checkpoint.store import RunStore
from megatron_fleet.config.errors import UserError, printable
from megatron_fleet.config.files import parse_json, read_object
from megatron_fleet.config.units import size
from megatron_fleet.storage.folder import Folder
from megatron_fleet.storage.local import LocalFolder
from megatron_fleet.storage.open import open_folder
from megatron_fleet.storage.run_folder import IDENTITY, RunFolder, in_use
from megatron_fleet.telemetry.shards import SUFFIX
from megatron_fleet.telemetry.sinks import read_metrics

PASS_AT_1 = "eval/all/pass_at_1"
_RECORDS = re.compile(
    rf"(?:(.*)/)?(?:(?:global_step_(\d+)|eval_only)/(?:greedy/)?[^/]+\.jsonl|global_step_(\d+)\.jsonl"
    rf"|{TRAJECTORIES}/(?:step|eval|greedy)_(\d+){re.escape(SUFFIX)}"
    rf"|(?:{FLEET_EVALUATIONS}/global_step_(\d+)_evals/[^/]+|{FLEET_TRAINING}/global_step_(\d+))\.jsonl)"
)
"""Files of evaluations and training steps below a store, and their steps; the first group is the run's address."""
_STEP = re.compile(r"(?:^|/)(?:global_step_\d+|eval_only)$")
_CHECKPOINT = re.compile(rf"(?:(.*)/)?global_step_(\d+)/{re.escape(MANIFEST)}")


@dataclass(frozen=True, slots=True)
class SavedStep:
    """A whole checkpoint: its step, and its size in bytes."""

    step: int
    nbytes: int


@dataclass(slots=True)
class RunSummary:
    """Summary of a run as found in one place.

    Attributes:
        place: its folder, or its address in a store.
        kind: ``training``, or ``evaluation`` of ``mfleet eval``.
        state: ``running``, ``finished``, ``stopped``; ``stored`` for a run in a store; ``records`` where there are only
            trajectories and evaluations.
        step, steps: finished and wanted; ``None``: unknown.
        pass_at_1: of the last evaluation on record.
        updated: Unix time of the last record.
        checkpoints: newest first.
        superseded: checkpoints that no longer count.
        config: resolved configuration.
    """

    place: str
    id: str
    state: str
    step: int | None = None
    steps: int | None = None
    pass_at_1: float | None = None
    updated: float | None = None
    checkpoints: list[SavedStep] = field(default_factory=list)
    superseded: int = 0
    config: dict[str, Any] = field(default_factory=dict)
    kind: Literal["training", "evaluation"] = "training"

    @property
    def nbytes(self) -> int:
        """Bytes of all checkpoints that count."""
        return sum(saved.nbytes for saved in self.checkpoints)


def find_runs(place: str) -> list[RunSummary]:
    """Summaries of the runs directly in a folder, or anywhere below an address in an object store, by id.

    Raises:
        UserError: there is no such folder, or the store refuses.
    """
    if "://" in place:
        return sorted(_stored(place), key=lambda run: run.id)
    folder = Path(place)
    if not folder.is_dir():
        raise UserError(
            f"{place}: no such folder; name the folder of your runs, s3://bucket/prefix or gs://bucket/prefix."
        )
    here = [folder] if is_run(folder) else sorted(path for path in folder.iterdir() if is_run(path))
    return [_local(path) for path in here] or sorted(_stored(place), key=lambda run: run.id)


def find_run(place: str) -> RunSummary:
    """The summary of one run. Raises UserError when there is none, or several."""
    found = find_runs(place)
    if len(found) != 1:
        raise UserError(f"{place}: {len(found) or 'no'} runs are there; name one of them, see `mfleet runs list`.")
    return found[0]


def folder_name(place: str) -> str:
    """Return the last part of a folder's path or of an address, as a name for it."""
    return place.rstrip("/").rpartition("/")[2] if "://" in place else Path(place).resolve().name


def prune(place: str, keep: int, remove: bool) -> list[str]:
    """Remove superseded checkpoints of a run and all but its newest ``keep``; of a local run the newest good one stays.

    Args:
        remove: ``False``: only return what would be removed.

    Returns:
        Names of the folders.

    Raises:
        UserError: the run is in use, or all its checkpoints are damaged, and nothing was removed.
    """
    run = find_run(place)
    old = [saved.step for saved in run.checkpoints[keep:]]
    if "://" in place or not (Path(run.place) / IDENTITY).is_file():
        store = RunStore(run.place)
        gone = sorted([*old, *store.superseded()])
        for step in gone if remove else ():
            store.remove(step)
        return [f"global_step_{step}" for step in gone]
    with RunFolder(Path(run.place), run.id):
        checkpoints = Checkpoints(Path(run.place) / "checkpoints", keep)
        good = checkpoints.newest() if remove and old else None
        old = [step for step in old if good is None or step != good.step]
        paths = [*(checkpoints.path_of(step) for step in sorted(old)), *checkpoints.superseded()]
        if remove:
            checkpoints.remove(paths)
    return [path.name for path in paths]


def _local(folder: Path) -> RunSummary:
    if (folder / IDENTITY).is_file():
        run = RunSummary(str(folder), str(read_object(folder / IDENTITY, "restore it").get("id")), "stopped")
    else:
        run = RunSummary(str(folder), folder.resolve().name, "records")
    if (folder / "config.json").is_file():
        run.config = read_object(folder / "config.json")
    if is_evaluation(folder):
        return _evaluation(run, folder)
    _read_rows(run, folder / "metrics.jsonl")
    if run.step is None:
        _read_records(run, LocalFolder(folder), RunFiles(str(folder)).names)
    for path in Checkpoints(folder / "checkpoints", 1).folders():
        try:
            checkpoint = Checkpoint.open(path)
        except UserError:
            continue  # `mfleet train` says what is wrong with it
        run.checkpoints.append(SavedStep(checkpoint.step, sum(f["bytes"] for f in checkpoint.files().values())))
    run.superseded = len(Checkpoints(folder / "checkpoints", 1).superseded())
    if in_use(folder):
        run.state = "running"
    elif run.steps is not None and (run.step or 0) >= run.steps:
        run.state = "finished"
    return run


def _evaluation(run: RunSummary, folder: Path) -> RunSummary:
    run.kind, run.state, result = "evaluation", "stopped", folder / RESULT
    if result.is_file():
        run.state, run.updated = "finished", result.stat().st_mtime
        found = read_object(result).get(PASS_AT_1)
        run.pass_at_1 = found if isinstance(found, int | float) else None
    if in_use(folder):
        run.state = "running"
    return run


def _read_records(run: RunSummary, folder: Folder, names: Iterable[str]) -> None:
    """Read the newest step, and pass@1 of the last evaluation if it is on record, from evaluations and training steps.

    Args:
        folder: what ``names`` are relative to.
    """
    newest: tuple[int, str] | None = None
    for name in names:
        if (found := _RECORDS.fullmatch(name)) is None:
            continue
        step = max((int(number) for number in found.groups()[1:] if number is not None), default=0)
        run.step = max(run.step or 0, step)
        if name.endswith(f"/{AGGREGATED}") and "/greedy/" not in name and (newest is None or step >= newest[0]):
            newest = step, name
    if newest is not None:
        rows = parse_rows(folder.read(newest[1]), folder.join(newest[1]))
        run.pass_at_1 = next((row[PASS_AT_1] for row in rows if isinstance(row.get(PASS_AT_1), int | float)), None)


def _stored(place: str) -> Iterator[RunSummary]:
    base = open_folder(place)
    sizes = base.sizes()
    steps: dict[str, list[int]] = {}
    records: dict[str, list[str]] = {}
    for name in sizes:
        if found := _CHECKPOINT.fullmatch(name):
            steps.setdefault(found[1] or "", []).append(int(found[2]))
        elif (found := _RECORDS.fullmatch(name)) and not _STEP.search(found[1] or ""):
            records.setdefault(found[1] or "", []).append(name)
    for prefix in steps:
        yield _checkpoints(base, sizes, place, prefix, len(steps[prefix]))
    for prefix in records.keys() - steps.keys():
        evaluations = re.sub(r"(^|.*/)rollouts/([^/]+)", r"\1evals/\2", prefix)
        if evaluations != prefix and evaluations in records:
            continue  # training steps of the same run
        address = f"{place.rstrip('/')}/{prefix}".rstrip("/")
        run = RunSummary(address, address.rpartition("/")[2], "records")
        _read_records(run, base, records[prefix])
        yield run


def _checkpoints(base: Folder, sizes: Mapping[str, int], place: str, prefix: str, count: int) -> RunSummary:
    """The summary of a run with checkpoints, ``count`` whole ones, those that no longer count included."""
    address = f"{place.rstrip('/')}/{prefix}".rstrip("/")
    run = RunSummary(address, address.rpartition("/")[2], "stored")
    start = f"{prefix}/" if prefix else ""
    for step in RunStore(address).steps():
        folder = f"{start}global_step_{step}/"
        run.checkpoints.append(SavedStep(step, sum(n for name, n in sizes.items() if name.startswith(folder))))
    run.superseded = count - len(run.checkpoints)
    if run.checkpoints:
        run.step = run.checkpoints[0].step
        name = f"{start}global_step_{run.step}/{RECORDS}/config.json"
        if name in sizes:
            config = parse_json(base.read(name), base.join(name))
            run.config = config if isinstance(config, dict) else {}
            run.steps = _steps(run.config)
    return run


def _read_rows(run: RunSummary, metrics: Path) -> None:
    rows = read_metrics(metrics)
    run.steps = _steps(run.config)
    if rows:
        run.step, run.updated = rows[-1]["step"], rows[-1].get("time")
        run.pass_at_1 = next((row[PASS_AT_1] for row in reversed(rows) if row.get(PASS_AT_1) is not None), None)


def _steps(config: Mapping[str, Any]) -> int | None:
    section = config.get("run")
    steps = section.get("steps") if isinstance(section, dict) else None
    return steps if isinstance(steps, int) else None


def as_json(runs: Sequence[RunSummary]) -> str:
    """Summaries as a JSON list, without their configurations."""
    return json.dumps([{k: v for k, v in asdict(run).items() if k != "config"} for run in runs], indent=1)


def as_table(runs: Sequence[RunSummary]) -> str:
    """Summaries, a line each."""
    rows = [("run", "kind", "state", "step", "pass@1", "checkpoints", "size", "last record", "place")]
    for run in runs:
        step = "–" if run.step is None else f"{run.step}" if run.steps is None else f"{run.step}/{run.steps}"
        score = "–" if run.pass_at_1 is None else f"{run.pass_at_1:.3f}"
        steps = ", ".join(str(saved.step) for saved in run.checkpoints[:3]) or "–"
        steps += f" and {more} more" if (more := len(run.checkpoints) - 3) > 0 else ""
        rows.append((run.id, run.kind, run.state, step, score, steps, size(run.nbytes), when(run.updated), run.place))
    return columns(rows)


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Text in aligned columns; names in cells may come from anywhere."""
    rows = [[*map(printable, row)] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def when(moment: float | None) -> str:
    """Local date and time of a Unix time."""
    return "–" if moment is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(moment))

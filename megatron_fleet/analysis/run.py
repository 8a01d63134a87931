"""Read a run: configuration, metrics, evaluations. Missing parts become notes, not errors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from megatron_fleet.analysis import fleet_layout
from megatron_fleet.analysis.episodes import Episode, number_of, read_episodes, shown
from megatron_fleet.analysis.run_files import CONFIG, METRICS, TRAJECTORIES, RunFiles, is_evaluation
from megatron_fleet.config.errors import UserError
from megatron_fleet.config.files import read_object
from megatron_fleet.config.sections.evaluation import EvalConfig
from megatron_fleet.data.split import MANIFEST as SPLIT_MANIFEST
from megatron_fleet.telemetry.charts import resumed_at
from megatron_fleet.telemetry.shards import IMAGES, SUFFIX, Shard
from megatron_fleet.telemetry.sinks import read_metrics
from megatron_fleet.telemetry.trajectories import FILE_NAME

EVALUATIONS = ("eval", "greedy")
TRAINING = "step"
STEP_FILES = 8
"""Training steps whose trajectories are read."""


@dataclass(slots=True)
class Run:
    """Contents of one run.

    Attributes:
        folder: its folder; of a run in a store, that of the copies of its files.
        config, split: ``config.json`` and ``split.json``; empty when the file is missing.
        rows: ``metrics.jsonl``, in order of step.
        compared: ``(kind, step)`` → episodes of the first and the last evaluation of each kind; for a run without
            evaluations, of its first and last training step.
        evaluations: kind → the steps of its evaluations whose trajectories are on disk.
        training_steps: steps whose trajectories are on disk.
        notes: missing or skipped parts, one sentence each.
        aggregated: metrics of evaluations in the layout of Fleet's training system, one row for each.
        fleet: ``(kind, step)`` → files in that layout, where there are no others.
        files: all files; ``None`` for a run that was not read from files.
    """

    folder: Path
    config: dict[str, Any] = field(default_factory=dict)
    split: dict[str, Any] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    compared: dict[tuple[str, int], list[Episode]] = field(default_factory=dict)
    evaluations: dict[str, list[int]] = field(default_factory=dict)
    training_steps: list[int] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    aggregated: list[dict[str, Any]] = field(default_factory=list)
    fleet: dict[tuple[str, int], list[str]] = field(default_factory=dict)
    files: RunFiles | None = None

    @property
    def name(self) -> str:
        return str(self.setting("run", "name") or shown(self.id))

    @property
    def id(self) -> str:
        """``run.id`` of the configuration, else the last part of the address."""
        if found := self.setting("run", "id"):
            return str(found)
        if self.files is not None and self.files.remote:
            return self.files.place.rstrip("/").rpartition("/")[2]
        return self.folder.resolve().name

    @property
    def title(self) -> str:
        """Return the kind of the run and its name; the name of an evaluation is that of its folder."""
        return f"Evaluation {shown(self.folder.resolve().name)}" if self.is_evaluation else f"Run {self.name}"

    @property
    def is_evaluation(self) -> bool:
        """Whether ``mfleet eval`` made it: there is no training to report."""
        return is_evaluation(self.folder)

    @property
    def model(self) -> str:
        return str(self.setting("model", "path") or "")

    @property
    def pass_threshold(self) -> float:
        """``eval.pass_threshold`` of the run's configuration, or the default."""
        found = number_of(self.setting("eval", "pass_threshold"))
        return EvalConfig().pass_threshold if found is None else found

    def setting(self, section: str, key: str) -> Any:
        """Return a text or number of the configuration, or ``None``."""
        found = self.config.get(section)
        value = found.get(key) if isinstance(found, dict) else None
        return shown(value) if isinstance(value, str) else value if isinstance(value, int | float) else None

    @property
    def main_kind(self) -> str:
        """Kind that tables compare: evaluations at the training temperature if there are any, else greedy ones, else
        training steps."""
        kinds = {kind for kind, _ in self.compared}
        return next((kind for kind in (*EVALUATIONS, TRAINING) if kind in kinds), EVALUATIONS[0])

    def first_and_last(self, kind: str) -> tuple[int | None, int | None]:
        """Return the first and the last step of a kind in ``compared``; the last is ``None`` if there is only one."""
        steps = sorted(step for k, step in self.compared if k == kind)
        return (steps[0] if steps else None), (steps[-1] if len(steps) > 1 else None)

    def episodes(self, kind: str, step: int | None) -> list[Episode]:
        return self.compared.get((kind, step), []) if step is not None else []

    def evaluation(self, kind: str, step: int) -> list[Episode]:
        """Return the episodes of any evaluation; reads one that is not in ``compared``."""
        found = self.compared.get((kind, step))
        return self.read_step(kind, step) if found is None else found

    def read_step(self, kind: str, step: int) -> list[Episode]:
        """Read the episodes of one evaluation or training step; unusable ones are skipped with a note."""
        names = self.fleet.get((kind, step), [])
        path = self.path_of(kind, step)
        name = f"the dump of {kind} {step}" if names else path.name
        self.fetch(names or [f"{TRAJECTORIES}/{path.name}"])
        try:
            if names:
                paths = [self.folder / name for name in names]
                episodes, left_out = fleet_layout.read_files(paths, kind, step, self.pass_threshold)
            else:
                episodes, left_out = read_episodes(path, self.pass_threshold)
        except (OSError, UserError) as error:
            why = error.strerror if isinstance(error, OSError) else str(error)
            self.notes.append(f"{name} cannot be read and was left out ({why}).")
            return []
        if left_out:
            self.notes.append(f"{name}: {left_out} episodes are cut or damaged and were left out.")
        return episodes

    def path_of(self, kind: str, step: int) -> Path:
        """Return the file of an evaluation or training step."""
        return self.folder / TRAJECTORIES / f"{kind}_{step:06d}{SUFFIX}"

    def fetch(self, names: Iterable[str]) -> None:
        """Make files exist in ``folder``, if the run has them. Raises UserError when a store refuses."""
        if self.files is not None:
            self.files.fetch(names)

    def fetch_images(self, digests: Iterable[str]) -> None:
        """Make the files of images exist in ``folder``, if the run has them."""
        wanted = set(digests)
        names = [] if self.files is None else self.files.names
        self.fetch(n for n in names if n.startswith(f"{IMAGES}/") and Path(n).stem in wanted)

    def arrays(self, kind: str, step: int) -> dict[str, np.ndarray] | None:
        """Read the arrays of a step (`Shard.arrays`); ``None`` when there are none, or they cannot be read."""
        if (kind, step) in self.fleet:
            return None
        path = self.path_of(kind, step)
        try:
            self.fetch([f"{TRAJECTORIES}/{path.name}"])
            return Shard.open(path).arrays()
        except UserError:
            self.notes.append(f"{path.name}: missing or damaged, so its trajectories are shown without tokens.")
            return None


def read_run(place: Path | str) -> Run:
    """Read a run from its folder, from a store, or from the files of Fleet's training system.

    Raises:
        UserError: no such folder, neither metrics nor trajectories in it, or the store refuses.
    """
    files = RunFiles(str(place))
    own = [m for name in files.names if (m := FILE_NAME.fullmatch(name.removeprefix(f"{TRAJECTORIES}/")))]
    sets = {(m[1], int(m[2])) for m in own}
    run = Run(files.folder, files=files)
    run.fleet = {key: names for key, names in fleet_layout.files_of_sets(files.names).items() if key not in sets}
    run.fetch((CONFIG, METRICS, SPLIT_MANIFEST))
    if files.remote:
        run.notes.append(f"Read from {shown(files.place)}.")
    run.rows = read_metrics(files.folder / METRICS)
    if not run.rows:
        run.aggregated = _aggregated(run)
    if not (run.rows or run.aggregated or sets or run.fleet):
        where = f"{place} holds neither metrics.jsonl nor trajectories"
        raise UserError(f"{where}; name the folder of a run (run.out), or its address in a store.")
    _read_config(run, only_fleet=not (sets or run.rows))
    for kind in EVALUATIONS:
        run.evaluations[kind] = sorted(step for k, step in sets | run.fleet.keys() if k == kind)
        _read_ends(run, kind, run.evaluations[kind])
    run.training_steps = sorted(step for k, step in sets | run.fleet.keys() if k == TRAINING)
    if not run.compared:
        _read_ends(run, TRAINING, run.training_steps)
    run.notes += _gaps(run)
    return run


def spread(steps: Sequence[int], count: int) -> list[int]:
    """Return at most ``count`` of the sorted steps, evenly spaced, including the first and the last."""
    if len(steps) <= count:
        return list(steps)
    return [steps[round(i * (len(steps) - 1) / (count - 1))] for i in range(count)]


def _read_config(run: Run, only_fleet: bool) -> None:
    """Read configuration, split and the numbers of the metrics log. ``only_fleet``: there are no files of ours."""
    missing = not run.rows
    if missing:
        run.rows = [dict(row) for row in run.aggregated]
    if only_fleet:
        run.notes += [*fleet_layout.SCORES, fleet_layout.MISSING]
        steps = sorted(step for kind, step in run.fleet if kind == TRAINING)
        run.notes += [fleet_layout.NO_TASKS] if steps else []
        for step in spread(steps, STEP_FILES):
            run.rows.append(fleet_layout.step_row(step, run.read_step(TRAINING, step)))
        run.rows.sort(key=lambda row: row["step"])
    else:
        run.config = _json(run.folder / CONFIG, run.notes, "the model and the name of the run are unknown")
        if not run.is_evaluation:
            run.split = _json(run.folder / SPLIT_MANIFEST, run.notes, "the content hash of its tasks is unknown")
        run.notes += [fleet_layout.MISSING] if run.fleet else []
    run.rows = [_numbers(row) for row in run.rows]
    if run.rows and missing:
        run.notes.append(fleet_layout.NO_METRICS)
    elif missing and not run.is_evaluation:
        run.notes.append(f"{METRICS}: missing or empty, so there are no curves and no learning signal.")


def _aggregated(run: Run) -> list[dict[str, Any]]:
    """Read the metrics that evaluations in the layout of Fleet's training system have."""
    assert run.files is not None
    rows: list[dict[str, Any]] = []
    names = fleet_layout.aggregated(run.files.names)
    run.fetch(names.values())
    for step, name in sorted(names.items()):
        try:
            rows.append(fleet_layout.read_aggregated(run.folder / name, step))
        except (UserError, OSError):
            run.notes.append(f"{name} cannot be read and was left out.")
    return rows


def _read_ends(run: Run, kind: str, steps: Sequence[int]) -> None:
    """Read the first and the last of ``steps``."""
    for step in sorted({*steps[:1], *steps[-1:]}):
        episodes = run.read_step(kind, step)
        if episodes:
            run.compared[kind, step] = episodes


_shown = cache(shown)
"""Names of metrics are the same in every row."""


def _numbers(row: dict[str, Any]) -> dict[str, Any]:
    numbers = {_shown(name): number_of(value) for name, value in row.items()}
    return {name: value for name, value in numbers.items() if value is not None} | {"step": row["step"]}


def _json(path: Path, notes: list[str], consequence: str) -> dict[str, Any]:
    try:
        return read_object(path)
    except UserError:
        notes.append(f"{path.name}: missing or unreadable, so {consequence}.")
        return {}


def _gaps(run: Run) -> list[str]:
    notes = []
    steps = [row for row in run.rows if "accounting/episodes" in row]
    kind = run.main_kind
    first, last = run.first_and_last(kind)
    if first is None or kind == TRAINING:
        notes.append(
            "There are no trajectories of an evaluation, so results of single tasks on held-out data are not shown."
        )
    elif last is None and not run.is_evaluation:
        notes.append(f"There are trajectories of one evaluation only (step {first}), so there is no before and after.")
    elif first != 0 and not run.is_evaluation:
        notes.append(f"There is no evaluation at step 0; the first one, after step {first}, stands for it.")
    if run.rows and not steps and not run.training_steps:
        notes.append("No training step was finished.")
    elif len(steps) == 1:
        notes.append("Only one training step was finished; a curve has a single point.")
    if attempts := resumed_at(run.rows):
        notes.append(f"The run was resumed before step {', '.join(map(str, attempts))}.")
    return notes

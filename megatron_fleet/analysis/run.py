"""Read a run folder: configuration, metrics, evaluations. Missing parts become notes, not errors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from megatron_fleet.analysis.episodes import FILE_NAME, Episode, number_of, read_episodes, shown
from megatron_fleet.config.errors import UserError
from megatron_fleet.config.files import read_object
from megatron_fleet.config.sections.evaluation import EvalConfig
from megatron_fleet.data.split import MANIFEST as SPLIT_MANIFEST
from megatron_fleet.telemetry.charts import resumed_at
from megatron_fleet.telemetry.sinks import read_metrics

_KINDS = {"token_ids": "i", "action_mask": "b", "behaviour_logprobs": "f", "offsets": "i"}
"""Arrays of a step → numpy dtype kind."""
EVALUATIONS = ("eval", "greedy")
TRAINING = "step"


@dataclass(slots=True)
class Run:
    """Contents of one run folder.

    Attributes:
        config, split: ``config.json`` and ``split.json``; empty when the file is missing.
        rows: ``metrics.jsonl``, in order of step.
        compared: ``(kind, step)`` → episodes of the first and the last evaluation of each kind; for a run without
            evaluations, of its first and last training step.
        training_steps: steps whose trajectories are on disk.
        notes: missing or skipped parts, one sentence each.
    """

    folder: Path
    config: dict[str, Any] = field(default_factory=dict)
    split: dict[str, Any] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    compared: dict[tuple[str, int], list[Episode]] = field(default_factory=dict)
    training_steps: list[int] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return str(self.setting("run", "name") or shown(self.folder.resolve().name))

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

    def read_step(self, kind: str, step: int) -> list[Episode]:
        """Read the episodes of one file; unreadable lines are skipped with a note."""
        path = self.folder / "trajectories" / f"{kind}_{step:06d}.jsonl"
        try:
            episodes, left_out = read_episodes(path, self.pass_threshold)
        except OSError as error:
            self.notes.append(f"{path.name}: cannot be read ({error.strerror}) and was left out.")
            return []
        if left_out:
            self.notes.append(f"{path.name}: {left_out} lines are cut or damaged and were left out.")
        return episodes

    def arrays(self, kind: str, step: int) -> dict[str, np.ndarray] | None:
        """Read the arrays of a step (shapes: telemetry/trajectories.py); ``None`` when they cannot be read."""
        path = self.folder / "trajectories" / f"{kind}_{step:06d}.npz"
        try:
            if not path.is_file():
                raise FileNotFoundError(path)
            with np.load(path, allow_pickle=False) as file:
                arrays = {name: file[name] for name in _KINDS}
            offsets, total = arrays["offsets"], len(arrays["token_ids"])
            if any(arrays[name].dtype.kind not in kinds or arrays[name].ndim != 1 for name, kinds in _KINDS.items()):
                raise ValueError("arrays of other types")
            if len(arrays["action_mask"]) != total or len(arrays["behaviour_logprobs"]) != total:
                raise ValueError("lengths differ")
            if offsets[0] != 0 or offsets[-1] != total or (np.diff(offsets) < 0).any():
                raise ValueError("offsets of something else")
        except Exception:  # on broken archives zipfile, zlib and numpy may raise anything
            self.notes.append(f"{path.name}: missing or damaged, so its trajectories are shown without tokens.")
            return None
        return arrays


def read_run(folder: Path) -> Run:
    """Read a run folder.

    Raises:
        UserError: no such folder, or neither metrics nor trajectories in it.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; name the folder that a run wrote to (run.out).")
    names = [m for path in sorted((folder / "trajectories").glob("*.jsonl")) if (m := FILE_NAME.fullmatch(path.name))]
    run = Run(folder)
    run.rows = _metrics(folder / "metrics.jsonl", run.notes)
    if not run.rows and not names:
        raise UserError(f"{folder}: holds neither metrics.jsonl nor trajectories; name the folder of a run (run.out).")
    run.config = _json(folder / "config.json", run.notes, "the model and the name of the run are unknown")
    run.split = _json(folder / SPLIT_MANIFEST, run.notes, "the content hash of its tasks is unknown")
    for kind in EVALUATIONS:
        _read_ends(run, kind, sorted(int(m[2]) for m in names if m[1] == kind))
    run.training_steps = sorted(int(m[2]) for m in names if m[1] == TRAINING)
    if not run.compared:
        _read_ends(run, TRAINING, run.training_steps)
    run.notes += _gaps(run)
    return run


def _read_ends(run: Run, kind: str, steps: Sequence[int]) -> None:
    """Read the first and the last of ``steps``."""
    for step in sorted({*steps[:1], *steps[-1:]}):
        episodes = run.read_step(kind, step)
        if episodes:
            run.compared[kind, step] = episodes


def _metrics(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    """Read the rows that have a step, keeping only their finite numbers."""
    rows = [_numbers(row) for row in (read_metrics(path) if path.is_file() else [])]
    if not rows:
        notes.append(f"{path.name}: missing or empty, so there are no curves and no learning signal.")
    return rows


def _numbers(row: dict[str, Any]) -> dict[str, Any]:
    numbers = {shown(name): number_of(value) for name, value in row.items()}
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
            "There are no trajectories of an evaluation, so nothing here says how single tasks went on held-out data."
        )
    elif last is None:
        notes.append(f"There are trajectories of one evaluation only (step {first}), so there is no before and after.")
    elif first != 0:
        notes.append(f"There is no evaluation at step 0; the first one, after step {first}, stands for it.")
    if run.rows and not steps:
        notes.append("No training step was finished.")
    elif len(steps) == 1:
        notes.append("Only one training step was finished; a curve has a single point.")
    if attempts := resumed_at(run.rows):
        notes.append(f"The run was resumed before step {', '.join(map(str, attempts))}.")
    return notes

"""Store of an evaluation's finished episodes, so that an interrupted evaluation can resume."""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_fleet.agents.trajectory import Outcome, Trajectory
from megatron_fleet.config.errors import UserError
from megatron_fleet.config.files import read_object
from megatron_fleet.config.schema import Config
from megatron_fleet.data.task import Task
from megatron_fleet.storage.local import write_atomically
from megatron_fleet.telemetry.shards import SUFFIX
from megatron_fleet.telemetry.trajectories import load_trajectories, save_trajectories

IDENTITY = "evaluation.json"
LARGEST = 1e100
"""Larger magnitudes are not plausible measurements, and their sums overflow."""
FLUSH_EPISODES, FLUSH_S = 64, 20.0
"""Episodes, or seconds, after which finished episodes are flushed to disk; a crash loses at most these."""

_DECIDE = {
    "run": {"seed", "deterministic"},
    "rollout": {"max_context", "sampling", "thinking", "renderer", "max_no_action_turns", "max_retries"},
    "env": {"kind", "url"},
}
"""Keys that determine an episode, in addition to the whole section ``agent``."""


def identity(config: Config, model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings shared by all episodes of one evaluation. ``model``: identifies the weights."""
    tree = config.model_dump(mode="json")
    decide = {name: {key: tree[name][key] for key in sorted(keys)} for name, keys in _DECIDE.items()}
    return {**decide, "agent": tree["agent"], "model": {"dtype": config.model.dtype, **model}}


def task_digest(task: Task) -> str:
    """Return a digest over all fields of a task."""
    return hashlib.blake2b(repr(task).encode("utf-8", "surrogatepass"), digest_size=12).hexdigest()


class EpisodeStore:
    """Episodes below one folder, in part files of several each. Used by one thread."""

    def __init__(self, folder: Path, of: Mapping[str, Any], tasks: Sequence[Task]) -> None:
        """Open or create the store.

        Args:
            of: settings shared by the episodes, see ``identity``.
            tasks: tasks to be played; there may be more or fewer than before.

        Raises:
            UserError: the folder holds episodes with other settings, or a task has changed.
        """
        self._file, self._parts = folder / IDENTITY, folder / "parts"
        self._tasks = list(tasks)
        known = self._check(of)
        content = {"of": of, "tasks": known | {task.key: task_digest(task) for task in tasks}}
        try:
            self._parts.mkdir(parents=True, exist_ok=True)
            write_atomically(self._file, (json.dumps(content, indent=2) + "\n").encode())
        except OSError as error:
            why = error.strerror
            raise UserError(f"{folder} cannot be written ({why}); name another folder with --out.") from None
        self._open: defaultdict[str, list[Trajectory]] = defaultdict(list)
        self._flushed = time.monotonic()

    def played(self, kind: str, samples: int) -> dict[tuple[int, int], Trajectory]:
        """Return the stored episodes of ``kind``, by ``(index of the task, sample)``."""
        places = {task.key: index for index, task in enumerate(self._tasks)}
        found = {}
        for path in sorted(self._parts.glob(f"{kind}-*{SUFFIX}")):
            for trajectory in _read_part(path):
                if trajectory.task_key in places and trajectory.sample < samples:
                    trajectory.group = places[trajectory.task_key]
                    found[trajectory.group, trajectory.sample] = trajectory
        return found

    def add(self, kind: str, trajectory: Trajectory) -> None:
        """Store a finished episode. An aborted one is left out, because it is still to be played."""
        if trajectory.outcome not in (Outcome.ABORTED, Outcome.REFUSED):
            self._open[kind].append(trajectory)
        if sum(map(len, self._open.values())) >= FLUSH_EPISODES or time.monotonic() - self._flushed > FLUSH_S:
            self.flush()

    def flush(self) -> None:
        """Write pending episodes to disk."""
        for kind, trajectories in self._open.items():
            if trajectories:
                names = (re.fullmatch(r".*-([0-9]{6})", path.stem) for path in self._parts.glob(f"{kind}-*{SUFFIX}"))
                number = 1 + max((int(name[1]) for name in names if name), default=-1)
                save_trajectories(self._parts / f"{kind}-{number:06d}{SUFFIX}", trajectories)
            for trajectory in trajectories:
                trajectory.images = {}  # on disk now; screenshots of many episodes would take gigabytes of memory
        self._open.clear()
        self._flushed = time.monotonic()

    def _check(self, of: Mapping[str, Any]) -> dict[str, str]:
        """Check that the stored settings match ``of``; return the digests of the stored tasks."""
        if not self._file.exists():
            return {}
        advice = "choose another folder with --out, or remove this one."
        before = read_object(self._file, advice.removesuffix("."))
        shared, tasks = before.get("of"), before.get("tasks")
        if not isinstance(shared, dict) or not isinstance(tasks, dict):
            raise UserError(f"{self._file} does not say what its episodes were played with; {advice}")
        for name, now in _flat(of).items():
            was = _flat(shared).get(name)
            if was != now:
                raise UserError(f"{self._file}: its episodes were played with {name}={was}, not {now}; {advice}")
        for task in self._tasks:
            if tasks.get(task.key, task_digest(task)) != task_digest(task):
                raise UserError(f"{self._file}: task {task.key} is not what it was when it was played; {advice}")
        return tasks


def _read_part(path: Path) -> list[Trajectory]:
    """Read the episodes of one part file. Raises UserError if it is damaged."""
    try:
        found = load_trajectories(path)
        for trajectory in found:
            _check(trajectory)
    except (UserError, ValueError, TypeError) as error:
        raise UserError(
            f"{path} is damaged ({str(error).removeprefix(f'{path} '):.100}); remove it, and its episodes are played "
            f"again."
        ) from None
    return found


def _check(t: Trajectory) -> None:
    """Raise ValueError or TypeError for values from a file that are invalid in a trajectory."""
    t.check(images_kept=False)
    texts = (t.task_key, t.env_key, t.reward_reason, *(() if t.final_answer is None else (t.final_answer,)))
    if not all(isinstance(text, str) for text in texts):
        raise TypeError("a text field has another type")
    if type(t.sample) is not int or t.sample < 0:
        raise TypeError("sample is not a number")
    numbers = (*t.metrics.values(), *(() if t.reward is None else (t.reward,)))
    if not all(isinstance(number, int | float) and abs(number) < LARGEST for number in numbers):
        raise TypeError("a number field has another type")
    places = [n for s in t.spans for n in (s.start, s.end, s.turn, s.weight_version)]
    places += [n for image in t.image_spans for n in (image.start, image.end)]
    if not all(type(n) is int for n in (*places, *t.segment_starts)):
        raise TypeError("a place is not a number")
    for message in t.messages:
        if not isinstance(message["role"], str) or not isinstance(message["content"], str):
            raise TypeError("a message has no text")
    kinds = (t.token_ids.dtype.kind, t.action_mask.dtype.kind, t.behaviour_logprobs.dtype.kind)
    if kinds != ("i", "b", "f"):
        raise TypeError("arrays of other types")


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return leaves by dotted name, as they are after a JSON round trip."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = json.loads(json.dumps(value))
    return found

"""Reading of a run's folder while the run writes to it. Each look reads what is new since the last one, and no more."""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from megatron_fleet.analysis.episodes import number_of, read_episodes, shown
from megatron_fleet.analysis.run import Run
from megatron_fleet.analysis.transcripts import load_tokenizer, piece_text, record_of, thumbnail, token_fields
from megatron_fleet.config.errors import UserError
from megatron_fleet.config.files import environment_name, parse_json, read_object
from megatron_fleet.storage.local import open_regular, os_errors_as_user_error
from megatron_fleet.telemetry.charts import CHARTS, ENV
from megatron_fleet.telemetry.rewards import is_solved
from megatron_fleet.telemetry.shards import IMAGES, Shard
from megatron_fleet.telemetry.status import RunStatus, read_status
from megatron_fleet.telemetry.trajectories import FILE_NAME, image_file

RECENT = 32
"""Newest rows that are kept whole; of older ones, only what curves show."""
SEARCH_S = 1.0
"""Seconds that one search spends on files that it has not read before."""
MOST_EPISODES = 1_000_000
"""Episodes whose rows are kept, about 250 bytes each; older ones are not searched."""
SETTLED_S = 2.0
"""A folder that changed less than so many seconds ago may change again without a later time of modification."""
KINDS = ("step", "eval", "greedy")
LISTED = ("task", "env", "sample", "outcome", "reward", "tokens", "metrics")
"""Columns of a shard that the list of trajectories needs."""
_ENVIRONMENT = re.compile(r"(?:reward|environment|eval)/([^/]+)/.+")
_CURVES = re.compile(
    "|".join(re.escape(name).replace(re.escape(ENV), "[^/]+") for _, _, lines in CHARTS for name in lines)
)


@dataclass(frozen=True, slots=True)
class Row:
    """One episode of the list. ``result``: as in `Episode`; ``turns`` and ``tokens``: their number."""

    kind: str
    step: int
    line: int
    env: str
    task: str
    sample: int
    outcome: str
    reward: float | None
    result: str
    turns: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Wanted:
    """Filter of the list. Empty texts and ``None`` select everything.

    Attributes:
        env: as in the names of metrics.
        reward: ``solved``, ``partial`` (above 0, but not solved), ``zero`` (0 or below) or ``unknown``.
        text: part of a task's key.
    """

    kind: str = ""
    step: int | None = None
    env: str = ""
    outcome: str = ""
    reward: str = ""
    text: str = ""

    def file(self, kind: str, step: int) -> bool:
        """Return whether a shard may hold episodes that match."""
        return self.kind in ("", kind) and self.step in (None, step)

    def matches(self, row: Row) -> bool:
        """Return whether an episode of a shard that may match does."""
        return (
            (not self.env or environment_name(row.env) == self.env)
            and self.outcome in ("", row.outcome)
            and self.reward in ("", reward_class(row))
            and self.text.lower() in row.task.lower()
        )


@dataclass(frozen=True, slots=True)
class Found:
    """Episodes of a search, newest first.

    Attributes:
        more: there are older ones that were not looked at, or not returned.
        searched_to: step of the oldest shard that was looked at; ``None``: none was.
    """

    rows: list[Row]
    more: bool
    searched_to: int | None


def reward_class(row: Row) -> str:
    """Return the value of `Wanted.reward` that an episode has."""
    if row.reward is None:
        return "unknown"
    return "solved" if row.result == "solved" else "partial" if row.reward > 0 else "zero"


class MetricsTail:
    """Rows of a metrics log that grows.

    Its last line may be extended in place, and a resumed run replaces the file by a shorter one.

    Attributes:
        rows: step, attempt and what curves show of every row.
        recent: the newest ``RECENT`` rows, whole.
        version: changes with the rows.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.version = 0
        self._latest: dict[str, tuple[int, float] | None] = {}
        self._latest_of = -1  # their version
        self._clear()

    def _clear(self) -> None:
        self.version += 1
        self.rows: list[dict[str, Any]] = []
        self.recent: deque[dict[str, Any]] = deque(maxlen=RECENT)
        self._last_at = 0  # byte offset of the last row
        self._seen: tuple[int, int, int] | None = None  # the file as it was read last

    def read(self) -> None:
        """Read what was written since the last call. Raises UserError when the file cannot be read."""
        if not self._path.exists():
            if self.rows:
                self._clear()
            return
        with os_errors_as_user_error(self._path, "read"), open_regular(self._path) as file:
            stat = os.fstat(file.fileno())
            seen = stat.st_ino, stat.st_mtime_ns, stat.st_size
            if seen == self._seen:
                return
            if self._seen is not None and (stat.st_ino != self._seen[0] or stat.st_size <= self._last_at):
                self._clear()
            if self._last_at:
                file.seek(self._last_at - 1)
                if file.read(1) != b"\n":  # another file, with the inode of a removed one
                    self._clear()
            file.seek(self._last_at)
            if self._take(file.read()):
                self._seen = seen  # else the last line is being written, and the next call reads it

    def _take(self, content: bytes) -> bool:
        """Add the rows from the last known one on; return whether all lines were whole."""
        at, whole = self._last_at, True
        for number, line in enumerate(content.split(b"\n")[:-1]):
            row = _row(line, self._path)
            again = number == 0 and bool(self.rows)
            if again and row is not None and row["step"] != self.rows[-1]["step"]:
                self._clear()  # another file
                return False
            whole = row is not None
            if row is not None:
                self._add(row, again)
                self._last_at = at
            at += len(line) + 1
        return whole

    def _add(self, row: dict[str, Any], replace: bool) -> None:
        if replace and self.recent[-1] == row:
            return
        self.version += 1
        slim = {sys.intern(name): value for name, value in row.items() if name in ("step", "attempt") or _drawn(name)}
        if replace:
            self.rows[-1], self.recent[-1] = slim, row
        else:
            self.rows.append(slim)
            self.recent.append(row)

    def latest(self, name: str) -> tuple[int, float] | None:
        """Return the newest value that is on hand of a metric, and its step."""
        if self._latest_of != self.version:
            self._latest, self._latest_of = {}, self.version
        if name not in self._latest:
            rows = (row for rows in (self.recent, self.rows) for row in reversed(rows) if name in row)
            self._latest[name] = next(((row["step"], row[name]) for row in rows), None)
        return self._latest[name]


@lru_cache(maxsize=100_000)
def _drawn(name: str) -> bool:
    return _CURVES.fullmatch(name) is not None


def _row(line: bytes, path: Path) -> dict[str, Any] | None:
    """Return the finite numbers of a line; ``None`` for a damaged one."""
    try:
        row = parse_json(line, str(path))
    except UserError:
        return None
    if not isinstance(row, dict) or type(row.get("step")) is not int:
        return None
    numbers = {shown(name): number_of(value) for name, value in row.items()}
    return {name: value for name, value in numbers.items() if value is not None} | {"step": row["step"]}


class RunFollower:
    """A run's folder, read piece by piece. Safe to use from several threads.

    Attributes:
        metrics: rows so far.
        status: what the run does now; ``None``: it has not said so.
        problems: files that cannot be read, a sentence each.
        shards: ``(step, kind)`` → path of each file of episodes, newest first.
        version: changes with ``shards``.
    """

    def __init__(self, folder: Path) -> None:
        """Raises UserError when the folder does not exist or cannot be listed."""
        if not folder.is_dir():
            raise UserError(f"{folder}: no such folder; name the folder that a run writes to (run.out).")
        with os_errors_as_user_error(folder, "listed"):
            os.listdir(folder)
        self.run = Run(folder)
        self.metrics = MetricsTail(folder / "metrics.jsonl")
        self.status: RunStatus | None = None
        self.problems: list[str] = []
        self.shards: dict[tuple[int, str], Path] = {}
        self.version = 0
        self.lock = threading.RLock()
        self._marks: dict[Path, tuple[int, int, int]] = {}
        self._rows: dict[tuple[int, str], list[Row]] = {}
        self._damaged: dict[tuple[int, str], str] = {}
        self._episodes = 0
        self._names: dict[str, str] = {}
        self._environments: set[str] = set()

    def look(self) -> None:
        """Read status and metrics, and list the files of episodes."""
        with self.lock:
            problems = []
            for read in (self._read_config, self._read_status, self.metrics.read, self._list_shards):
                try:
                    read()
                except UserError as error:
                    problems.append(str(error))
            self.problems = [*problems, *self._damaged.values()]

    def _read_config(self) -> None:
        path = self.run.folder / "config.json"
        if self._changed(path):
            del self._marks[path]  # for the case that it cannot be read
            self.run.config = read_object(path)
            self._changed(path)

    def _read_status(self) -> None:
        self.status = None
        self.status = read_status(self.run.folder)

    def _list_shards(self) -> None:
        folder = self.run.folder / "trajectories"
        if not self._changed(folder):
            return
        with os_errors_as_user_error(folder, "listed"):
            if time.time() - folder.stat().st_mtime < SETTLED_S:
                del self._marks[folder]
            found = {
                (int(m[2]), m[1]): folder / m[0] for name in os.listdir(folder) if (m := FILE_NAME.fullmatch(name))
            }
        old = [key for key in self._rows if key not in found or self._changed(found[key])]
        for key in old:
            self._forget(key)
        if old or found.keys() != self.shards.keys():
            ordered = sorted(found, key=lambda key: (key[0], KINDS.index(key[1])), reverse=True)
            self.shards = {key: found[key] for key in ordered}
            self.version += 1

    def _forget(self, key: tuple[int, str]) -> None:
        self._episodes -= len(self._rows.pop(key))
        self._damaged.pop(key, None)

    def _changed(self, path: Path) -> bool:
        """Return whether a file or folder exists and is another one than at the last call."""
        try:
            stat = path.stat()
        except OSError:
            return False
        mark = stat.st_ino, stat.st_mtime_ns, stat.st_size
        changed = self._marks.get(path) != mark
        self._marks[path] = mark
        return changed

    def search(self, wanted: Wanted, limit: int) -> Found:
        """Return the newest episodes that match, at most ``limit``. Files that were not read before are read until
        ``SEARCH_S`` is over, at least one; a repeated search resumes where this one ended."""
        rows: list[Row] = []
        until, searched_to, read = time.monotonic() + SEARCH_S, None, 0
        with self.lock:
            files = [key for key in self.shards if wanted.file(key[1], key[0])]
            for key in files:
                if len(rows) > limit:
                    break
                if key not in self._rows:
                    if self._episodes >= MOST_EPISODES or (read and time.monotonic() > until):
                        return Found(rows[:limit], True, searched_to)
                    read += 1
                rows += [row for row in self._rows_of(key) if wanted.matches(row)]
                searched_to = key[0]
        return Found(rows[:limit], len(rows) > limit, searched_to)

    def _rows_of(self, key: tuple[int, str]) -> list[Row]:
        if key not in self._rows:
            path = self.shards[key]
            self._changed(path)
            try:
                records = Shard.open(path).records(LISTED)
            except UserError as error:
                self._damaged[key] = str(error)
                records = []
            self._rows[key] = [self._row(key, line, record) for line, record in enumerate(records)]
            self._episodes += len(records)
            self._environments |= {environment_name(env) for env in {row.env for row in self._rows[key]}}
        return self._rows[key]

    def _row(self, key: tuple[int, str], line: int, record: dict[str, Any]) -> Row:
        reward, turns = number_of(record["reward"]), number_of(record["metrics"].get("turns"))
        env, task, outcome = (self._once(shown(record[name])) for name in ("env", "task", "outcome"))
        solved = None if reward is None else is_solved(reward, self.run.pass_threshold)
        result = {True: "solved", False: "not solved", None: "unknown"}[solved]
        place = key[1], key[0], line
        return Row(*place, env, task, record["sample"], outcome, reward, result, int(turns or 0), record["tokens"])

    def _once(self, text: str) -> str:
        """Return the one copy of a text that many rows have."""
        return self._names.setdefault(text, text)

    def environments(self) -> list[str]:
        """Return the environments seen so far, as in the names of metrics."""
        with self.lock:
            names = {name for row in self.metrics.recent for name in row}
            named = {m[1] for m in map(_ENVIRONMENT.fullmatch, names) if m}
            now = {environment_name(env) for env in (self.status.environments if self.status else {})}
            return sorted((named | now | self._environments) - {"all"})

    def episode(self, kind: str, step: int, line: int) -> tuple[Row, dict[str, Any]] | None:
        """Read one episode: its row of the list, and what the page shows of it; ``None``: there is none.

        Raises:
            UserError: its file cannot be read.
        """
        with self.lock:
            if (path := self.shards.get((step, kind))) is None:
                return None
            rows = self._rows_of((step, kind))
            threshold = self.run.pass_threshold
        shard = Shard.open(path)
        if not 0 <= line < min(shard.rows, len(rows)):
            return None
        episodes, _ = read_episodes(path, threshold, [line])
        if not episodes:
            raise UserError(f"{path}: row {line} is not an episode; remove that row.")
        record = record_of(episodes[0]) | token_fields(shard.arrays([line]), 0)
        record["pieces"] = (
            {} if self._tokenizer is None else {i: piece_text(self._tokenizer, i) for i in {*record["ids"]}}
        )
        return rows[line], record

    @cached_property
    def _tokenizer(self) -> Any:
        return load_tokenizer(self.run)

    def image(self, digest: str) -> bytes | None:
        """Return a small JPEG of an image of the run."""
        path = image_file(self.run.folder / IMAGES, digest)
        return None if path is None else thumbnail(path)

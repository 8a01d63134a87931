"""Files of a run by their names in a run's folder, from wherever they are: a folder, a store, the layout of Fleet's
training system.

What is not in a run's folder is copied to a cache when it is needed, and only then. Its layout there is that of a run's
folder, so all readers work on both.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_fleet.checkpoint.checkpoints import RECORDS
from megatron_fleet.checkpoint.store import RunStore
from megatron_fleet.config.errors import UserError
from megatron_fleet.config.files import parse_json
from megatron_fleet.data.split import MANIFEST as SPLIT_MANIFEST
from megatron_fleet.storage.folder import Folder
from megatron_fleet.storage.local import LocalFolder
from megatron_fleet.storage.open import open_folder
from megatron_fleet.storage.transfer import Copy, transfer

TRAJECTORIES = "trajectories"
FLEET_EVALUATIONS, FLEET_TRAINING = "dumped_evals", "dumped_trajectories"
"""Folders of Fleet's training system: one of evaluations, one of training steps."""
CONFIG, METRICS = "config.json", "metrics.jsonl"
EVALUATION, RESULT = "evaluation.json", "metrics.json"
"""Files of ``mfleet eval``: what it plays, and what came of it."""
_MARKS = (METRICS, TRAJECTORIES, FLEET_EVALUATIONS, FLEET_TRAINING, "run.json")
"""A folder with one of these is a run's folder."""
_RECORDS = (CONFIG, METRICS, SPLIT_MANIFEST)
_AS_IT_IS = re.compile(
    rf"(?:{'|'.join(map(re.escape, _RECORDS))}|(?:{TRAJECTORIES}|images|{FLEET_TRAINING})/[^/]+|hf/tokenizer\.json"
    rf"|{FLEET_EVALUATIONS}/[^/]+/(?:greedy/)?[^/]+\.jsonl)"
)
_IN_STEP = re.compile(r"(?:global_step_\d+|eval_only)/((?:trajectories|images)/[^/]+)")
_EVALUATION = re.compile(r"(?:global_step_(\d+)|eval_only)(?:_evals)?/((?:greedy/)?[^/]+\.jsonl)")
_TRAINING = re.compile(r"global_step_\d+\.jsonl")


@dataclass(frozen=True, slots=True)
class _Stored:
    """A file outside a run's folder."""

    source: Folder
    name: str
    size: int


class RunFiles:
    """Files of one run.

    Attributes:
        place: the address that the user gave.
        folder: folder with the layout of a run's: the run's own one, or a cache, where files are once they are fetched.
        names: all files that a report may need, as they are called in ``folder``.
    """

    def __init__(self, place: str) -> None:
        """List the files.

        Raises:
            UserError: there is no such folder, or the store refuses.
        """
        self.place = place
        self._stored: dict[str, _Stored] = {}
        folder = Path(place)
        self.remote = "://" in place or not is_run(folder)
        if not self.remote:
            self.folder = folder
            self.names = sorted(_listed(folder))
            return
        if "://" not in place and not folder.is_dir():
            raise UserError(
                f"{place}: no such folder; name the folder that a run wrote to (run.out), s3://bucket/… or gs://bucket/…."
            )
        self._find(place)
        address = place.rstrip("/") if "://" in place else os.path.abspath(place)
        self.folder = cache_folder() / hashlib.sha256(address.encode("utf-8", "replace")).hexdigest()[:20]
        self.names = sorted(self._stored)

    def fetch(self, names: Iterable[str]) -> None:
        """Copy files to ``folder`` unless they are there, in the size that the store says. JSON files, which are small
        and may have changed without a change of size, are copied again.

        Raises:
            UserError: the store or the disk refuses.
        """
        copies: dict[int, tuple[Folder, list[Copy]]] = {}
        for name in names:
            stored = self._stored.get(name)
            if stored is None or (not name.endswith(".json") and _size(self.folder / name) == stored.size):
                continue
            copy = Copy(stored.name, name, stored.size)
            copies.setdefault(id(stored.source), (stored.source, []))[1].append(copy)
        for source, wanted in copies.values():
            cache_folder().mkdir(mode=0o700, parents=True, exist_ok=True)
            transfer(source, LocalFolder(self.folder, cached=True), wanted)
            for copy in wanted:
                if (found := _size(self.folder / copy.target)) != copy.size:
                    raise UserError(
                        f"{self.folder / copy.target} has {found} bytes instead of {copy.size}; remove it, so that it "
                        f"is downloaded again."
                    )

    def _find(self, place: str) -> None:
        """List what is at an address, and what belongs to it elsewhere: where the run's configuration says that it
        uploads trajectories, and training steps beside evaluations.
        """
        address = place.rstrip("/")
        source = open_folder(address)
        sizes = source.sizes()
        self._add(source, sizes)
        for step in RunStore(address).steps()[:1] if any("/manifest" in name for name in sizes) else ():
            for record in _RECORDS:
                name = f"global_step_{step}/{RECORDS}/{record}"
                if name in sizes:
                    self._stored[record] = _Stored(source, name, sizes[name])
        for uploads in self._uploads():
            there = open_folder(uploads)
            self._add(there, there.sizes())
        parent, _, run = address.rpartition("/")
        if parent.endswith("/evals"):
            there = open_folder(f"{parent.removesuffix('/evals')}/rollouts/{run}")
            self._add(there, there.sizes())

    def _add(self, source: Folder, sizes: dict[str, int]) -> None:
        for name, size in sizes.items():
            if called := _called(name):
                self._stored.setdefault(called, _Stored(source, name, size))

    def _uploads(self) -> list[str]:
        """Addresses of the evaluations and of the training steps of a run in a checkpoint store."""
        stored = self._stored.get(CONFIG)
        if stored is None:
            return []
        config = parse_json(stored.source.read(stored.name), stored.source.join(stored.name))
        run = _setting(config, "run", "id")
        places = {"evals": _setting(config, "eval", "upload")}
        places["rollouts"] = _setting(config, "logging", "trajectories", "upload")
        return [f"{place.rstrip('/')}/{kind}/{run}" for kind, place in places.items() if run and "://" in place]


def _setting(config: Any, *names: str) -> str:
    """Return a text of a configuration; empty if it has none there."""
    for name in names:
        config = config.get(name) if isinstance(config, dict) else None
    return config if isinstance(config, str) else ""


def is_evaluation(folder: Path) -> bool:
    """Return whether ``mfleet eval`` wrote to a folder, and no training run did."""
    return (folder / EVALUATION).is_file() and not (folder / METRICS).exists()


def is_run(folder: Path) -> bool:
    """Return whether a folder is one that a run wrote to, ours or one of Fleet's training system."""
    try:
        return any((folder / name).exists() for name in _MARKS)
    except OSError:  # a folder of another user, a name that is too long
        return False


def _called(name: str) -> str | None:
    """Return the name in a run's folder of a file in a store, or ``None`` for one that no report needs."""
    name = name.removeprefix("exports/")
    if _AS_IT_IS.fullmatch(name):
        return name
    if found := _IN_STEP.fullmatch(name):
        return found[1]
    if found := _EVALUATION.fullmatch(name):
        return f"{FLEET_EVALUATIONS}/global_step_{found[1] or 0}_evals/{found[2]}"
    return f"{FLEET_TRAINING}/{name}" if _TRAINING.fullmatch(name) else None


def _listed(folder: Path) -> Iterator[str]:
    """Yield the files of a run's own folder that reports need; images and the tokenizer are looked up by name."""
    patterns = (*_RECORDS, f"{TRAJECTORIES}/*", f"{FLEET_TRAINING}/*", f"{FLEET_EVALUATIONS}/*/*.jsonl")
    for pattern in (*patterns, f"{FLEET_EVALUATIONS}/*/greedy/*.jsonl"):
        yield from (path.relative_to(folder).as_posix() for path in folder.glob(pattern))


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None


def cache_folder() -> Path:
    """Return the folder of copies of runs that are in stores; all of it may be removed at any time."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "megatron_fleet" / "runs"

"""Split of tasks into training and evaluation, by a hash of the key and, if given, the manifest of an earlier split.

The hash threshold is fixed, so it assigns a task regardless of the others. Limits on counts do not: a new task with a
smaller hash would push another out of a full evaluation set, into training. A manifest prevents that: former evaluation
tasks are never trained on, former training tasks never evaluated.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from megatron_fleet.config.errors import UserError
from megatron_fleet.config.files import parse_json
from megatron_fleet.config.sections.data import DataConfig
from megatron_fleet.data.task import Task

Fate = Literal["train", "eval", "retired", "unused"]
MANIFEST = "split.json"
"""File name of the manifest in a run's outputs and in a prepared folder."""
FORMAT = 1

Side = Literal["train", "eval", "retired"]


@dataclass(frozen=True, slots=True)
class Split:
    """Result of a split, each list in the order given.

    Attributes:
        train, held_out: the two sides.
        retired: see ``SplitManifest``.
        unused: on neither side this time: surplus tasks of a held-out environment or of a large one.
        notes: sentences about rules that could not be applied.
    """

    train: list[Task]
    held_out: list[Task]
    retired: list[Task]
    unused: list[Task]
    notes: list[str]


def key_hash(key: str) -> float:
    """Return a number in [0, 1): the first 8 bytes, big-endian, of MD5(key). Fleet's split uses the same hash."""
    return int.from_bytes(hashlib.md5(key.encode(), usedforsecurity=False).digest()[:8], "big") / 2**64


def split(tasks: Sequence[Task], rules: DataConfig, previous: SplitManifest | None = None) -> Split:
    """Assign every task; the order of ``tasks`` and of their environments does not matter.

    1. Candidates for evaluation are the tasks whose hash is below a threshold: ``rules.eval_fraction``, or
       ``expected_eval_per_env / n`` in an environment of n tasks if that is less. An environment with fewer than
       ``min_eval_per_env / eval_fraction`` tasks has none; one with more candidates than ``max_eval_per_env`` keeps
       those of the smallest hash. A held-out environment's tasks are all candidates.
    2. If there are more than ``max_eval``, they are taken round-robin over the environments, ordered by name.
    3. The others are for training, except those of held-out environments and those cut by ``max_env_share``.

    Args:
        rules: the keys of ``data`` named above.
        previous: manifest whose tasks keep their sides. In 1 and 2 these come before new tasks, the threshold and
            ``min_eval_per_env`` do not apply to them, and those that no longer fit are retired.
    """
    was = previous.sides() if previous is not None else {}
    by_env: defaultdict[str, list[Task]] = defaultdict(list)
    for task in sorted(tasks, key=lambda task: (key_hash(task.key), task.key)):
        by_env[task.env_key].append(task)
    chosen = _evaluation(by_env, rules, was)
    fates = {
        task.key: _fate(task, task.key in chosen, task.env_key in rules.held_out_environments, was.get(task.key))
        for task in tasks
    }
    notes = [
        f"data.held_out_environments names {env}, which has no tasks."
        for env in sorted(set(rules.held_out_environments) - by_env.keys())
    ]
    notes += _limit_shares(by_env, fates, rules.max_env_share)
    lists: dict[Fate, list[Task]] = {"train": [], "eval": [], "retired": [], "unused": []}
    for task in tasks:
        lists[fates[task.key]].append(task)
    return Split(lists["train"], lists["eval"], lists["retired"], lists["unused"], notes)


def _fate(task: Task, chosen: bool, held_out: bool, was: Side | None) -> Fate:
    """Decide a task's fate before ``max_env_share`` is applied."""
    if chosen:
        return "eval"
    if was in ("eval", "retired") or (was == "train" and held_out):
        return "retired"
    return "unused" if held_out else "train"


def _evaluation(by_env: Mapping[str, Sequence[Task]], rules: DataConfig, was: Mapping[str, Side]) -> set[str]:
    """Return the keys of the evaluation tasks. ``by_env``: tasks in the order of their hash."""
    # Old tasks first, then round-robin over environments.
    queue: list[tuple[bool, int, str, str]] = []
    for env_key, tasks in by_env.items():
        held_out = env_key in rules.held_out_environments
        threshold = 1.0 if held_out else rules.eval_fraction
        if rules.expected_eval_per_env is not None and not held_out:
            threshold = min(threshold, rules.expected_eval_per_env / len(tasks))
        old = [task.key for task in tasks if was.get(task.key) == "eval"]
        new = [task.key for task in tasks if task.key not in was and key_hash(task.key) < threshold]
        if not held_out and len(tasks) * rules.eval_fraction < rules.min_eval_per_env:
            new = []
        keys = old + new
        if not held_out:
            keys = keys[: rules.max_eval_per_env]
        queue += [(rank >= len(old), rank, env_key, key) for rank, key in enumerate(keys)]
    return {key for _, _, _, key in sorted(queue)[: rules.max_eval]}


def _limit_shares(by_env: Mapping[str, Sequence[Task]], fates: dict[str, Fate], share: float | None) -> list[str]:
    """Mark each environment's tasks beyond ``share``, the largest hashes, as ``unused``; return notes if impossible."""
    training = {env: [t.key for t in tasks if fates[t.key] == "train"] for env, tasks in by_env.items()}
    sizes = {env: len(keys) for env, keys in training.items() if keys}
    if share is None or not sizes:
        return []
    most = most_per_environment(sizes.values(), share)
    if most is None:
        largest = max(sizes, key=lambda env: (sizes[env], env))
        return [
            f"data.max_env_share={share:g} is not applied: it would cut {largest} below an even share (environments in "
            f"training: {len(sizes)})."
        ]
    for keys in training.values():
        fates.update(dict.fromkeys(keys[most:], "unused"))
    return []


def most_per_environment(sizes: Iterable[int], share: float) -> int | None:
    """Return the largest number of tasks per environment that leaves none with more than ``share`` of what remains.

    That is the largest m ≤ max(n) with m ≤ share · Σ min(n, m). Bisection finds it, because the right side minus the
    left is concave in m and 0 at 0. ``None`` if it would cut an environment below Σ n / E, the even share of E
    environments: always when E < 1/share, and where tiny environments would make large ones shrink to their size.
    """
    counts = sorted(sizes)
    low, high = 0, counts[-1]
    while low < high:
        middle = (low + high + 1) // 2
        # The tolerance is for shares that have no exact binary representation, such as 0.29 of 100.
        if middle <= share * sum(min(count, middle) for count in counts) + 1e-9:
            low = middle
        else:
            high = middle - 1
    return low if low == counts[-1] or low * len(counts) >= sum(counts) else None


@dataclass(frozen=True, slots=True)
class SplitManifest:
    """Assignment of tasks to sides. Tasks that appear only in a later version of the data are assigned then.

    Attributes:
        source: address of the tasks.
        sha256: hash of the source's content, hexadecimal.
        rules: the ``data.*`` keys that determined the split.
        eval, train: task keys of the two sides, sorted.
        retired: keys permanently on neither side: former evaluation tasks that exceed a limit now, and former training
            tasks of an environment that is held out now.
        files: name → SHA-256 of a prepared folder's files.
    """

    source: str
    sha256: str
    rules: dict[str, Any]
    eval: list[str]
    train: list[str]
    retired: list[str]
    files: dict[str, str] = field(default_factory=dict)

    def sides(self) -> dict[str, Side]:
        """Map task key → side."""
        sides: dict[str, Side] = dict.fromkeys(self.train, "train")
        return sides | dict.fromkeys(self.eval, "eval") | dict.fromkeys(self.retired, "retired")

    def dump(self) -> bytes:
        """Serialise to JSON, with equal bytes for equal manifests; ``parse`` reads it."""
        return (json.dumps({"format": FORMAT, **asdict(self)}, indent=1, ensure_ascii=False) + "\n").encode()

    @staticmethod
    def parse(data: bytes, where: str) -> SplitManifest:
        """Read what ``dump`` wrote.

        Raises:
            UserError: it is not a manifest of this format; the message names ``where``.
        """
        try:
            content = parse_json(data, where, f"give the {MANIFEST} of a run or prepared folder")
            if not isinstance(content, dict) or "format" not in content:
                raise ValueError("it has no format")
            if content.pop("format") != FORMAT:
                raise UserError(f"{where} is a split manifest of another format; this version reads {FORMAT}.")
            manifest = SplitManifest(**content)
            _check(manifest)
        except (ValueError, TypeError) as error:
            raise UserError(
                f"{where} is not a split manifest ({error}); give the {MANIFEST} of a run or prepared folder."
            ) from None
        return manifest


def _check(manifest: SplitManifest) -> None:
    seen: set[str] = set()
    for name, keys in (("eval", manifest.eval), ("train", manifest.train), ("retired", manifest.retired)):
        if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
            raise ValueError(f"{name} is not a list of task keys")
        if twice := _first(key for key in keys if key in seen):
            raise ValueError(f"task {twice} is on two sides")
        seen.update(keys)
    if not isinstance(manifest.rules, dict) or not isinstance(manifest.files, dict):
        raise ValueError("rules or files is not an object")


def _first(keys: Iterable[str]) -> str | None:
    return next(iter(keys), None)

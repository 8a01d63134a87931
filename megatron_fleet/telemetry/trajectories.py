"""Files of a run's episodes: a shard per step, images, and the first prompt of each environment."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from megatron_fleet.config.files import environment_name
from megatron_fleet.storage.local import is_unfinished, write_atomically
from megatron_fleet.telemetry.shards import IMAGES, SUFFIX, Shard, digests, encode

if TYPE_CHECKING:
    from megatron_fleet.agents.trajectory import Group, Trajectory

FILE_NAME = re.compile(r"(step|eval|greedy)_([0-9]{6})\.parquet")
"""Name of a shard: kind and step."""
KEPT_SHARE = 0.9
"""Share of the limit that removing old shards leaves, so that it is not done at every step."""
EXTENSIONS = {
    "image/png": "png",
    "image/jpeg": "jpg",
    "image/jpg": "jpg",
    "image/webp": "webp",
    "image/gif": "gif",
    "image/bmp": "bmp",
}
OTHER = "bin"
"""Extension for any other media type."""


class TrajectoryLog:
    """Log of episodes: a shard per step, ``step_000001.parquet``, ``eval_000001.parquet`` or ``greedy_000001.parquet``.

    Images are separate files in ``images`` next to the folder; episodes name them by the SHA-256 of their content.
    """

    def __init__(self, folder: Path, resumed_step: int | None) -> None:
        """``resumed_step``: keep files up to it; ``None`` = a new run, keep nothing."""
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.iterdir():
            step = re.fullmatch(r"(?:step|eval|greedy)_([0-9]{6})\..*", path.name)
            if is_unfinished(path.name) or (step and (resumed_step is None or int(step[1]) > resumed_step)):
                path.unlink()

    def write(self, step: int, groups: Sequence[Group], kind: Literal["step", "eval", "greedy"] = "step") -> list[Path]:
        """Write the shard and the images, each atomically; return their paths, the shard's first."""
        path = self._folder / f"{kind}_{step:06d}{SUFFIX}"
        return save_trajectories(path, [t for g in groups for t in g.trajectories])


def save_trajectories(path: Path, trajectories: Sequence[Trajectory]) -> list[Path]:
    """Write images and then the shard at ``path``, each atomically; return their paths, the shard's first.

    An image goes to the folder ``images`` next to that of ``path``, unless it exists there.
    """
    images = save_images(path.parent.parent / IMAGES, trajectories)
    write_atomically(path, encode(trajectories))
    return [path, *images]


def load_trajectories(path: Path) -> list[Trajectory]:
    """Load the episodes of a shard. Expert routing is not saved, and images are not loaded from their files.

    Raises:
        UserError: as for `Shard`.
    """
    from megatron_fleet.agents.trajectory import Outcome, Span, Trajectory
    from megatron_fleet.models.images import ImageSpan

    shard = Shard.open(path)
    arrays = shard.arrays()
    offsets = arrays.pop("offsets")
    found = []
    for row, a, b in zip(shard.records(), offsets[:-1], offsets[1:], strict=True):
        names = {"task_key": row["task"], "env_key": row["env"], "reward_reason": row["reason"]}
        same = {n: row[n] for n in ("group", "sample", "reward", "final_answer", "metrics", "messages")}
        spans, starts = tuple(Span(*span) for span in row["spans"]), tuple(row["segment_starts"])
        images = tuple(ImageSpan(a, b, name) for a, b, _, name in row["image_spans"])
        own: dict[str, Any] = {name: values[a:b] for name, values in arrays.items()}
        parts: dict[str, Any] = {"spans": spans, "segment_starts": starts, "image_spans": images}
        found.append(Trajectory(**own, **names, **same, **parts, outcome=Outcome(row["outcome"])))
    return found


def prune(folder: Path, max_bytes: float, stored: Mapping[str, int] | None = None) -> list[str]:
    """Remove the oldest shards of training steps, and the images that no other shard names, when all of it takes more
    than ``max_bytes``; return the names of the removed shards. Evaluations stay.

    Args:
        folder: of a `TrajectoryLog`.
        stored: names and sizes of the shards in a store; one that is not there stays.

    Raises:
        UserError: as for `Shard`, of a damaged one: which images it names is unknown, so nothing is removed.
    """
    images = folder.parent / IMAGES
    pictures = {path.stem: path for path in images.iterdir()} if images.is_dir() else {}
    sizes = {name: path.stat().st_size for name, path in pictures.items()}
    shards = sorted((int(m[2]), m[1], p) for p in folder.iterdir() if (m := FILE_NAME.fullmatch(p.name)))
    total = sum(sizes.values()) + sum(path.stat().st_size for *_, path in shards)
    if total <= max_bytes:
        return []
    old = [path for _, kind, path in shards if kind == "step"][:-1]  # the newest stays, for the pages of a live run
    named = {path: _named(path) if pictures else set() for *_, path in shards}
    uses = {name: sum(name in own for own in named.values()) for name in sizes}
    removed = []
    for path in old:
        size = path.stat().st_size
        if total <= KEPT_SHARE * max_bytes or (stored is not None and stored.get(path.name) != size):
            break
        path.unlink()
        removed.append(path.name)
        total -= size
        for name in named[path] & sizes.keys():
            uses[name] -= 1
            if not uses[name]:
                pictures[name].unlink()
                total -= sizes[name]
    return removed


def _named(path: Path) -> set[str]:
    return {name for row in Shard.open(path).records((IMAGES,)) for name in row[IMAGES]}


def save_images(folder: Path, trajectories: Sequence[Trajectory]) -> list[Path]:
    """Write the images of ``trajectories`` that ``folder`` lacks; return the files of all that they name."""
    for t in trajectories:
        for name, image in t.images.items():
            if image_file(folder, name) is None:
                folder.mkdir(parents=True, exist_ok=True)
                path = folder / f"{name}.{EXTENSIONS.get(image.media_type, OTHER)}"
                part = path.with_name(path.name + ".part")
                part.write_bytes(image.data)
                part.replace(path)
    return list(_files(folder, (name for t in trajectories for name in digests(t))))


def image_file(folder: Path, name: str) -> Path | None:
    """Return the file of a digest; ``None`` if it does not exist, or ``name`` is not a digest."""
    if len(name) != 64 or not set(name) <= set("0123456789abcdef"):
        return None
    kinds = dict.fromkeys([*EXTENSIONS.values(), OTHER])
    return next((path for kind in kinds if (path := folder / f"{name}.{kind}").is_file()), None)


def _files(folder: Path, names: Iterable[str]) -> Iterable[Path]:
    return (path for name in dict.fromkeys(names) if (path := image_file(folder, name)) is not None)


class PromptLog:
    """Writer of ``prompts/ENVIRONMENT.txt``: the first prompt of the first episode with one, control tokens visible."""

    def __init__(self, folder: Path, decode: Callable[[Sequence[int]], str]) -> None:
        """``decode``: text of token ids. Files of an earlier attempt are replaced."""
        self._folder, self._decode = folder, decode
        self._written: set[str] = set()

    def write(self, groups: Sequence[Group]) -> None:
        """Write the prompts of environments not seen before."""
        for trajectory in (t for group in groups for t in group.trajectories):
            env = environment_name(trajectory.env_key)
            if env in self._written or not trajectory.spans:
                continue
            prompt = trajectory.token_ids[: trajectory.spans[0].end].tolist()
            self._folder.mkdir(parents=True, exist_ok=True)
            write_atomically(self._folder / f"{env}.txt", self._decode(prompt).encode())
            self._written.add(env)

"""Files of a run's episodes: messages and tokens per step, images, and the first prompt of each environment."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from megatron_fleet.config.files import environment_name
from megatron_fleet.storage.local import write_atomically
from megatron_fleet.telemetry.sinks import json_number

if TYPE_CHECKING:
    from megatron_fleet.agents.trajectory import Group, Trajectory

IMAGES = "images"
"""Folder of a run."""
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
    """Log of messages and sampled tokens, per step.

    ``step_000001.jsonl`` (``eval_000001.jsonl``, ``greedy_000001.jsonl``): one readable line per trajectory.
    The ``.npz`` next to it: ``token_ids`` int32, ``action_mask`` bool and ``behaviour_logprobs`` float32, concatenated
    over the trajectories of all lines, and ``offsets`` int64 ``[lines + 1]``: line i has
    ``[offsets[i], offsets[i+1])``. Images are separate files in ``images`` next to the folder; lines name them by the
    SHA-256 of their content.
    """

    def __init__(self, folder: Path, resumed_step: int | None) -> None:
        """``resumed_step``: keep files up to it; ``None`` = a new run, keep nothing."""
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.iterdir():
            step = re.fullmatch(r"(?:step|eval|greedy)_([0-9]{6})\..*", path.name)
            if step and (resumed_step is None or int(step[1]) > resumed_step):
                path.unlink()

    def write(self, step: int, groups: Sequence[Group], kind: Literal["step", "eval", "greedy"] = "step") -> list[Path]:
        """Write both files and the images, each atomically; return their paths."""
        return save_trajectories(self._folder / f"{kind}_{step:06d}", [t for g in groups for t in g.trajectories])


def save_trajectories(stem: Path, trajectories: Sequence[Trajectory]) -> list[Path]:
    """Write images, ``stem.npz`` and then ``stem.jsonl``, each atomically; return their paths.

    An image goes to the folder ``images`` next to that of ``stem``, unless it exists there.
    """
    images = save_images(stem.parent.parent / IMAGES, trajectories)
    part = stem.with_suffix(".part")
    with part.open("wb") as file:
        np.savez_compressed(file, allow_pickle=False, **_arrays(trajectories))
    part.replace(stem.with_suffix(".npz"))
    lines = [json.dumps(_record(t), ensure_ascii=False, default=str) + "\n" for t in trajectories]
    write_atomically(stem.with_suffix(".jsonl"), "".join(lines).encode("utf-8", "replace"))
    return [stem.with_suffix(".jsonl"), stem.with_suffix(".npz"), *images]


def load_trajectories(path: Path) -> list[Trajectory]:
    """Load trajectories from ``path`` (the ``.jsonl``) and the ``.npz`` next to it.

    Expert routing is not saved, and images are not loaded from their files.
    """
    from megatron_fleet.agents.trajectory import Outcome, Span, Trajectory
    from megatron_fleet.models.images import ImageSpan

    lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    with np.load(path.with_suffix(".npz"), allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files}
    found = []
    for row, a, b in zip(map(json.loads, lines), arrays["offsets"][:-1], arrays["offsets"][1:], strict=True):
        own = {name: arrays[name][a:b] for name in ("token_ids", "action_mask", "behaviour_logprobs")}
        names = {"task_key": row["task"], "env_key": row["env"], "reward_reason": row["reason"]}
        same = {n: row[n] for n in ("group", "sample", "reward", "final_answer", "metrics", "messages")}
        spans, starts = tuple(Span(*span) for span in row["spans"]), tuple(row["segment_starts"])
        images = tuple(ImageSpan(a, b, name) for a, b, _, name in row.get("image_spans", ()))
        parts: dict[str, Any] = {"spans": spans, "segment_starts": starts, "image_spans": images}
        found.append(Trajectory(**own, **names, **same, **parts, outcome=Outcome(row["outcome"])))
    return found


def _record(t: Trajectory) -> dict[str, Any]:
    return {
        "task": t.task_key,
        "env": t.env_key,
        "group": t.group,
        "sample": t.sample,
        "outcome": t.outcome,
        "reward": json_number(t.reward),
        "reason": t.reward_reason,
        "final_answer": t.final_answer,
        "tokens": len(t.token_ids),
        "action_tokens": int(t.action_mask.sum()),
        "metrics": t.metrics,
        "segment_starts": t.segment_starts,
        "spans": [[s.kind, s.start, s.end, s.turn, s.weight_version] for s in t.spans],
        "image_spans": [[s.start, s.end, _turn(t, s.start), s.digest] for s in t.image_spans],
        "messages": t.messages,
    }


def _turn(t: Trajectory, place: int) -> int:
    return next(span.turn for span in t.spans if span.start <= place < span.end)


def _arrays(trajectories: Sequence[Trajectory]) -> dict[str, np.ndarray]:
    def joined(arrays: list[np.ndarray], dtype: type) -> np.ndarray:
        return np.concatenate([np.empty(0, dtype), *arrays]).astype(dtype)

    return {
        "token_ids": joined([t.token_ids for t in trajectories], np.int32),
        "action_mask": joined([t.action_mask for t in trajectories], np.bool_),
        "behaviour_logprobs": joined([t.behaviour_logprobs for t in trajectories], np.float32),
        "offsets": np.cumsum([0, *(len(t.token_ids) for t in trajectories)], dtype=np.int64),
    }


def digests(trajectory: Trajectory) -> list[str]:
    """Return the distinct digests of the images in its messages and its tokens, in order."""
    said = (name for message in trajectory.messages for name in message.get("images", ()))
    return list(dict.fromkeys([*said, *(span.digest for span in trajectory.image_spans)]))


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

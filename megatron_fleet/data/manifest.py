"""Split manifest: records each task's side of the split, so that later splits keep it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from megatron_fleet.config.errors import UserError
from megatron_fleet.config.files import parse_json

NAME = "split.json"
"""File name of the manifest in a run's outputs and in a prepared folder."""
FORMAT = 1

Side = Literal["train", "eval", "retired"]


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
            content = parse_json(data, where, f"give the {NAME} of a run or prepared folder")
            if not isinstance(content, dict) or "format" not in content:
                raise ValueError("it has no format")
            if content.pop("format") != FORMAT:
                raise UserError(f"{where}: is a split manifest of another format; this version reads {FORMAT}.")
            manifest = SplitManifest(**content)
            _check(manifest)
        except (ValueError, TypeError) as error:
            raise UserError(
                f"{where}: is no split manifest ({error}); give the {NAME} of a run or prepared folder."
            ) from None
        return manifest


def _check(manifest: SplitManifest) -> None:
    seen: set[str] = set()
    for name, keys in (("eval", manifest.eval), ("train", manifest.train), ("retired", manifest.retired)):
        if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
            raise ValueError(f"{name} is no list of task keys")
        if twice := _first(key for key in keys if key in seen):
            raise ValueError(f"task {twice} is on two sides")
        seen.update(keys)
    if not isinstance(manifest.rules, dict) or not isinstance(manifest.files, dict):
        raise ValueError("rules or files is no object")


def _first(keys: Iterable[str]) -> str | None:
    return next(iter(keys), None)

"""Folders of files as trees: name → content."""

from __future__ import annotations

import io
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from fuzz.trees import Special, bytes_of, json_of, value_of
from megatron_fleet.telemetry import shards

_DTYPES = {"token_ids": np.int32, "action_mask": np.bool_, "behaviour_logprobs": np.float32}
"""As the program writes them, where the values allow it."""
MOST_PATH = 800
MOST_NAME = 200
"""Bytes of a name that a mutation may give a file: longer ones are no files."""


def write(folder: Path, tree: Any) -> None:
    """Make the files of a tree. Names that no file can have, or that lead out of the folder, are left out.

    A name's ending says how a tree becomes bytes: ``.jsonl`` one line for each item, ``.npz`` arrays, ``.parquet`` the
    rows of a shard of episodes, else JSON.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in tree.items() if isinstance(tree, dict) else ():
        path = folder / name if _is_name(name) else None
        if path is None or os.path.lexists(path):
            continue
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError:  # a file of the tree is in the way
            continue
        _make(path, content)


def read(folder: Path) -> dict[str, bytes]:
    """The tree of the files below a folder."""
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def structured(name: str, data: bytes) -> Any:
    """The tree of a file's content, by the ending of its name; `write` makes an equal file of it."""
    if name.endswith(".jsonl"):
        return [json.loads(line) for line in data.splitlines()]
    if name.endswith(".npz"):
        with np.load(io.BytesIO(data)) as arrays:
            return {key: arrays[key].tolist() for key in arrays.files}
    if name.endswith(".parquet"):
        return parquet.read_table(io.BytesIO(data)).to_pylist()
    return json.loads(data) if name.endswith(".json") else data


def left_over(folder: Path) -> list[str]:
    """Files of writers that did not finish."""
    return [path.name for path in folder.rglob("*") if path.name.endswith((".part", ".partial", ".tmp"))]


def _is_name(name: str) -> bool:
    try:
        fits = all(0 < len(os.fsencode(part)) <= MOST_NAME and part not in (".", "..") for part in name.split("/"))
    except UnicodeEncodeError:
        return False
    return fits and "\0" not in name and len(name) < MOST_PATH


def _make(path: Path, content: Any) -> None:
    if content == Special("fifo"):
        os.mkfifo(path)
    elif content == Special("folder"):
        path.mkdir()
    elif content == Special("loop"):
        path.symlink_to(path.name)
    elif content == Special("device"):
        path.symlink_to("/dev/full")
    else:
        path.write_bytes(content_of(path.name, content))


def content_of(name: str, tree: Any) -> bytes:
    """The bytes of a file of that name."""
    if name.endswith(".jsonl") and isinstance(tree, list):
        return b"".join(json_of(row).encode() + b"\n" for row in tree)
    if name.endswith(".npz") and isinstance(tree, dict):
        return _npz(tree)
    if name.endswith(".parquet") and isinstance(tree, list):
        return _shard(tree)
    return bytes_of(tree)


def _shard(rows: list[Any]) -> bytes:
    """A shard with these rows; where they are no rows of one, a table of what they are, else no table."""
    rows, out = value_of(rows), io.BytesIO()
    for schema in (shards.schema(), None):
        with suppress(ValueError, TypeError, OverflowError, AttributeError, KeyError, pa.ArrowException):
            parquet.write_table(pa.Table.from_pylist(rows, schema=schema), out, write_page_checksum=True)
            return out.getvalue()
    return b"PAR1"


def _npz(tree: dict[str, Any]) -> bytes:
    """Arrays whose values are lists; what cannot be one is saved as text."""
    out, arrays = io.BytesIO(), {}
    for name, values in tree.items():
        for dtype in (_DTYPES.get(name), None, str):
            try:
                array = np.array(value_of(values), dtype)
                break
            except (ValueError, TypeError, OverflowError, RecursionError):
                array = np.array("no array")
        arrays[name.replace("/", "_").replace("\0", "_") or "_"] = (
            array if array.dtype.kind != "O" else array.astype(str)
        )
    try:
        np.savez(out, **arrays)
    except (ValueError, TypeError, UnicodeEncodeError):
        np.savez(out)
    return out.getvalue()

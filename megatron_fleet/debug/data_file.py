"""The data of an update on disk: one compressed ``.npz`` with every field of every Datum, in order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from megatron_fleet.algorithms.datum import Datum
from megatron_fleet.config.errors import UserError


def save_data(path: Path, data: Sequence[Datum]) -> None:
    """Write ``data`` bit for bit.

    Layout: ``sequences`` int64 is the number of sequences. A field of Datum is one array: those of all sequences,
    concatenated along their first axis; ``<field>.lengths`` int64 ``[sequences]`` has the length of each, −1 for
    ``None``. A field that is ``None`` everywhere is absent.

    Raises:
        TypeError: a Datum holds something other than arrays.
    """
    content = {"sequences": np.array(len(data), np.int64)}
    for field in fields(Datum):
        values = [getattr(datum, field.name) for datum in data]
        arrays = [value for value in values if value is not None]
        if wrong := next((a for a in arrays if not isinstance(a, np.ndarray) or a.ndim == 0), None):
            raise TypeError(f"Datum.{field.name} is a {type(wrong).__name__}, not an array")
        if arrays:
            content[field.name] = np.concatenate(arrays)
            lengths = [-1 if value is None else len(value) for value in values]
            content[f"{field.name}.lengths"] = np.array(lengths, np.int64)
    with path.open("wb") as file:
        np.savez_compressed(file, allow_pickle=False, **content)


def load_data(path: Path) -> list[Datum]:
    """Read a file written by `save_data`. Raises UserError when it is damaged, or holds objects."""
    try:
        with np.load(path, allow_pickle=False) as file:
            content = dict(file)
        columns: dict[str, list[Any]] = {}
        for field in fields(Datum):
            if field.name in content:
                columns[field.name] = _split(content[field.name], content[f"{field.name}.lengths"])
        count = int(content["sequences"])
        return [Datum(**{name: values[i] for name, values in columns.items()}) for i in range(count)]
    except Exception as error:  # zipfile, zlib and numpy raise anything for a damaged archive
        raise UserError(
            f"{path}: cannot be read ({type(error).__name__}); it is damaged, or holds something other than arrays."
        ) from None


def _split(joined: np.ndarray, lengths: np.ndarray) -> list[np.ndarray | None]:
    ends = np.cumsum(np.maximum(lengths, 0))
    return [None if n < 0 else joined[end - n : end] for n, end in zip(lengths, ends, strict=True)]

"""Contents of an HF folder or Megatron checkpoint, from headers only: tensors, shapes, dtypes, bytes, quantisation."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from megatron_fleet.config.errors import UserError
from megatron_fleet.config.files import MAX_DEPTH
from megatron_fleet.convert.origin import kept_template
from megatron_fleet.convert.template import open_template
from megatron_fleet.convert.to_hf import MARKER
from megatron_fleet.storage.open import open_folder
from megatron_fleet.weights.checkpoint_reader import MegatronCheckpoint
from megatron_fleet.weights.hf_folder import INDEX, JOURNAL, SINGLE, read_headers
from megatron_fleet.weights.torch_dist.dtypes import DTYPES
from megatron_fleet.weights.torch_dist.index import ChunkedTensor
from megatron_fleet.weights.torch_dist.pickle_reader import Opaque

MOST_TOLD = 100_000
"""Maximum number of values shown of the common state."""
_MOST_BRANCHES = 50


@dataclass(frozen=True, slots=True)
class TensorLine:
    """One tensor, or several of equal shape and dtype whose names differ only in numbers.

    Attributes:
        name: tensor name, with ``*`` for differing numbers.
        count: number of tensors.
        form: ``weight``; ``INT4 codes``, ``FP8 scales`` and so on for parts of quantised weights; ``= KEY`` for an
            additional key of bytes that are stored once, under ``KEY``.
        nbytes: total bytes; 0 for additional keys.
    """

    name: str
    count: int
    dtype: str
    shape: tuple[int, ...]
    form: str
    nbytes: int

    @property
    def is_alias(self) -> bool:
        """Whether the bytes belong to another key."""
        return self.form.startswith("= ")


@dataclass(frozen=True, slots=True)
class Contents:
    """Contents of a folder.

    Attributes:
        kind: ``hf`` or ``torch_dist``.
        objects: checkpoint entries that are not tensors; optimizer: optimizer tensors, not listed.
        passthrough: tensors that a converted checkpoint keeps in ``hf/`` for converting back.
        common: plain values of the non-tensor state; its ``args`` are the writer's command line.
    """

    url: str
    kind: str
    rows: tuple[TensorLine, ...]
    objects: int = 0
    optimizer: int = 0
    passthrough: tuple[TensorLine, ...] = ()
    common: Mapping[str, Any] = field(default_factory=dict)

    @property
    def tensors(self) -> int:
        """Number of stored tensors."""
        return sum(row.count for row in self.rows if not row.is_alias)

    @property
    def nbytes(self) -> int:
        """Total size of the stored tensors."""
        return sum(row.nbytes for row in self.rows)

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"tensors": self.tensors, "nbytes": self.nbytes}


def inspect(url: str, every_tensor: bool = False) -> Contents:
    """List the contents of a folder.

    Args:
        every_tensor: one row per tensor instead of one per kind.

    Raises:
        UserError: it is neither an HF folder nor a checkpoint, is damaged, or is an unfinished conversion.
    """
    folder = open_folder(url)
    sizes = folder.sizes()
    if INDEX in sizes or SINGLE in sizes:
        if JOURNAL in sizes and MARKER not in sizes:
            raise UserError(f"{url}: its conversion is not finished; run the same command again.")
        stored = read_headers(folder)
        forms = _forms(stored)
        rows = ((name, t.dtype, t.shape, forms.get(name, "weight"), t.nbytes) for name, t in stored.items())
        return Contents(url, "hf", _rows(rows, every_tensor))
    checkpoint = MegatronCheckpoint(folder)
    index = checkpoint.index
    return Contents(
        url,
        "torch_dist",
        _rows(_checkpoint_rows(index.tensors), every_tensor),
        len(index.objects),
        len(index.optimizer),
        _rows(_passthrough_rows(checkpoint), every_tensor),
        _plain(index.common, iter(range(MOST_TOLD))) or {},
    )


_Listed = tuple[str, str, tuple[int, ...], str, int]
"""Name, dtype, shape, form, bytes."""


def _checkpoint_rows(tensors: Mapping[str, ChunkedTensor]) -> Iterator[_Listed]:
    """Tensors by key; if several keys have the same chunks, the bytes are counted for the first."""
    first: dict[tuple[Any, ...], str] = {}
    for key, tensor in sorted(tensors.items()):
        # Tensors without elements have no chunks to identify them.
        owner = first.setdefault(tensor.chunks or (key,), key)
        if owner != key:
            yield key, tensor.dtype, tensor.shape, f"= {owner}", 0
        else:
            nbytes = math.prod(tensor.shape) * DTYPES[tensor.dtype].nbytes
            yield key, tensor.dtype, tensor.shape, "weight", nbytes


def _passthrough_rows(checkpoint: MegatronCheckpoint) -> Iterator[_Listed]:
    kept = kept_template(checkpoint)
    if kept is None:
        return
    template = open_template(kept)
    forms = _forms(template.model.stored)
    for name, (_, stored) in template.passthrough.items():
        yield name, stored.dtype, stored.shape, forms.get(name, "weight"), stored.nbytes


def _plain(value: Any, left: Iterator[int], depth: int = 0) -> Any:
    """JSON equivalent of a value from a pickle; ``None`` if there is none.

    ``left``: limits the number of values, one item each. A pickle of a few bytes can contain itself, or repeat one
    value exponentially many times.
    """
    if depth > MAX_DEPTH or next(left, None) is None:
        return None
    if isinstance(value, Opaque):
        return _plain(value.state, left, depth + 1) if value.name == "argparse.Namespace" else None
    if isinstance(value, dict):
        members = {str(k): _plain(v, left, depth + 1) for k, v in value.items()}
        return {k: plain for k, plain in members.items() if plain is not None}
    if isinstance(value, list | tuple):
        return [_plain(v, left, depth + 1) for v in value]
    if type(value) is int and abs(value) >= 1 << 64:
        return None
    # A str subclass is the name of a class.
    return value if type(value) in (str, int, float, bool) else None


def _forms(names: Iterable[str]) -> dict[str, str]:
    """Parts of quantised weights → their form. A weight is quantised if it has scales."""
    names = set(names)
    forms: dict[str, str] = {}
    for name in names:
        if name.endswith(".weight_packed"):
            base = name.removesuffix("_packed")
            forms |= {name: "INT4 codes", f"{base}_scale": "INT4 scales", f"{base}_shape": "INT4 shape"}
        elif name.endswith(".weight_scale_inv"):
            forms |= {name: "FP8 scales", name.removesuffix("_scale_inv"): "FP8 codes"}
    return {name: form for name, form in forms.items() if name in names}


_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_DIGITS = re.compile("[0-9]{1,18}")


def _rows(tensors: Iterable[_Listed], every: bool) -> tuple[TensorLine, ...]:
    """Build rows in natural order of the names."""
    groups: dict[tuple[Any, ...], list[_Listed]] = {}
    for listed in sorted(tensors, key=lambda t: _natural(t[0])):
        name, dtype, shape, form, _ = listed
        key = (name, form) if every else (_NUMBER.sub("*", name), _NUMBER.sub("*", form))
        groups.setdefault((*key, dtype, shape), []).append(listed)
    return tuple(
        TensorLine(found[0][0], 1, *found[0][1:])
        if len(found) == 1
        else TensorLine(name, len(found), dtype, shape, form, nbytes)
        for (name, form, dtype, shape), found in groups.items()
        for nbytes in [sum(listed[-1] for listed in found)]
    )


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if _DIGITS.fullmatch(part) else (-1, part) for part in name.split(".")]


def tree(rows: Iterable[TensorLine]) -> Iterator[tuple[int, str, TensorLine | None]]:
    """(depth, label, row or ``None`` for a branch) in name order; unbranched paths are merged into one line."""
    root: dict[str | None, Any] = {}
    for row in rows:
        node = root
        for part in row.name.split(".", _MOST_BRANCHES):
            node = node.setdefault(part, {})
        node.setdefault(None, []).append(row)
    yield from _walk(root, 0)


def _walk(node: dict[str | None, Any], depth: int) -> Iterator[tuple[int, str, TensorLine | None]]:
    """Walk a node; its ``None`` entry has the rows that end in it."""
    for label, child in node.items():
        if label is None:
            continue
        while len(child) == 1 and None not in child:
            ((part, child),) = child.items()
            label = f"{label}.{part}"
        for row in child.get(None, [None]):
            yield depth, label, row
        yield from _walk(child, depth + 1)

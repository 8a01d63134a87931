"""Comparison of two folders across formats: weights bit for bit or within a tolerance, everything else as bytes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_fleet.config.errors import UserError
from megatron_fleet.config.files import read_object
from megatron_fleet.convert.origin import find_template
from megatron_fleet.convert.template import originals
from megatron_fleet.storage.folder import Readable
from megatron_fleet.storage.open import open_folder
from megatron_fleet.weights.checkpoint_reader import CheckpointReader, MegatronCheckpoint, StoredMatrices
from megatron_fleet.weights.floats import cast
from megatron_fleet.weights.hf_folder import INDEX, ITEM_BYTES, SINGLE, StoredTensor
from megatron_fleet.weights.hf_model import Plain, open_model
from megatron_fleet.weights.hf_rows import HfReader, PerThread, RowReader
from megatron_fleet.weights.mapping import Interval

STEP_BYTES = 4 << 20
"""Bytes per side compared at once; their float32 copies and masks take ten times as much."""

FolderTensor = tuple[Readable, StoredTensor]


@dataclass(frozen=True, slots=True)
class Side:
    """A folder's weights as HF float tensors, plus the other tensors in its files.

    Attributes:
        tensors: name → shape; quantised tensors are listed as decoded, copies of a tensor under another name (a tied
            head, the embedding of an MTP layer) under their own name.
        others: tensors that Megatron does not hold: vision towers, stale buffers. For a checkpoint, the ones it keeps
            for converting back, or the ones in its template.
    """

    url: str
    tensors: Mapping[str, tuple[int, ...]]
    readers: PerThread[RowReader]
    others: Mapping[str, FolderTensor]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of everything that is compared."""
        return (*self.tensors, *self.others)

    @property
    def nbytes(self) -> int:
        """Total size of the values in their dtypes."""
        floats = sum(math.prod(shape) * ITEM_BYTES[self.dtype(name)] for name, shape in self.tensors.items())
        return floats + sum(stored.nbytes for _, stored in self.others.values())

    def dtype(self, tensor: str) -> str:
        """Dtype of a tensor's values."""
        return self.readers().dtype(tensor)

    def blocks(self, tensor: str) -> Iterator[Interval]:
        """Row blocks of a tensor."""
        shape = self.tensors[tensor]
        step = max(1, STEP_BYTES // max(1, math.prod(shape[1:]) * ITEM_BYTES[self.dtype(tensor)]))
        for row in range(0, shape[0], step):
            yield row, min(row + step, shape[0])


@dataclass(frozen=True, slots=True)
class _Copies:
    """A reader that resolves copies to the original tensor."""

    reader: RowReader
    of: Mapping[str, str]

    def dtype(self, tensor: str) -> str:
        return self.reader.dtype(self.of.get(tensor, tensor))

    def read_rows(self, tensor: str, rows: Interval) -> npt.NDArray[Any]:
        return self.reader.read_rows(self.of.get(tensor, tensor), rows)


@dataclass(frozen=True, slots=True)
class Difference:
    """Difference between two versions of one tensor.

    Attributes:
        count, total: number of differing and of compared values; both 0 if they could not be compared.
        largest: largest absolute difference.
    """

    tensor: str
    reason: str
    count: int = 0
    total: int = 0
    largest: float = 0.0

    def __str__(self) -> str:
        return f"{self.tensor}: {self.reason}"


def open_side(url: str, template: str | None = None) -> Side:
    """Open an HF folder or a Megatron checkpoint for comparison.

    Args:
        template: HF folder that identifies the checkpoint's model, if the checkpoint itself does not.

    Raises:
        UserError: it is neither, or is damaged.
    """
    folder = open_folder(url)
    sizes = folder.sizes()
    if INDEX in sizes or SINGLE in sizes:
        model = open_model(folder)
        stored_copies = {name: Plain(model.stored[name]) for name in model.table.repeated if name in model.stored}
        whole = replace(model, encodings={**model.encodings, **stored_copies})
        copies = {name: model.table.repeated[name] for name in stored_copies}
        others: dict[str, FolderTensor] = {name: (folder, model.stored[name]) for name in model.passthrough}
        return Side(url, _shapes(model.table.tensors, copies), PerThread(lambda: HfReader(whole)), others)
    checkpoint = MegatronCheckpoint(folder)
    found = find_template(checkpoint, template)
    table = found.model.table
    matrices = StoredMatrices(checkpoint, table)
    copies = {name: of for name, of in table.repeated.items() if name in found.model.stored}
    others = {name: found.passthrough[name] for name in found.model.passthrough}
    kept = originals(found)
    readers: PerThread[RowReader] = PerThread(lambda: _Copies(CheckpointReader(matrices, kept), copies))
    return Side(url, _shapes(table.tensors, copies), readers, others)


def _shapes(tensors: Mapping[str, tuple[int, ...]], copies: Mapping[str, str]) -> dict[str, tuple[int, ...]]:
    return {**tensors, **{name: tensors[of] for name, of in copies.items()}}


def compare(a: Side, b: Side, tolerance: float, workers: int, progress: Callable[[int], None]) -> list[Difference]:
    """Compare two sides; return the differing tensors in checkpoint order.

    Args:
        tolerance: largest absolute difference of weights that counts as equal; 0 compares bits (of the wider dtype
            if dtypes differ; −0 and 0 differ, equal NaNs are equal). ``others`` are always compared as bytes.
        progress: called with the number of bytes of ``a`` compared.
    """

    def compare_one(name: str) -> Difference | None:
        for side, other in ((a, b), (b, a)):
            if name not in side.tensors and name not in side.others:
                return Difference(name, f"missing in {side.url}")
            if name in side.tensors and name in other.others:
                return Difference(name, f"a weight of the model in {side.url}, not in {other.url}")
        if name in a.others:
            return _compare_bytes(a, b, name, progress)
        return _compare_tensor(a, b, name, tolerance, progress)

    with ThreadPoolExecutor(workers) as pool:
        found = list(pool.map(compare_one, dict.fromkeys((*a.names, *b.names))))
    return [difference for difference in found if difference is not None]


def _compare_bytes(a: Side, b: Side, name: str, progress: Callable[[int], None]) -> Difference | None:
    x, y = a.others[name][1], b.others[name][1]
    if (x.dtype, x.shape) != (y.dtype, y.shape):
        forms = f"{x.dtype} {list(x.shape)} in {a.url} and {y.dtype} {list(y.shape)} in {b.url}"
        return Difference(name, forms)
    count, at, first = 0, 0, ""
    for ours, theirs in zip(_bytes(a.others[name]), _bytes(b.others[name]), strict=True):
        differs = np.frombuffer(ours, np.uint8) != np.frombuffer(theirs, np.uint8)
        if differs.any() and not count:
            k = int(differs.argmax())
            first = f"first at byte {at + k}: {ours[k]:02x} and {theirs[k]:02x}"
        count += int(differs.sum())
        at += len(ours)
        progress(len(ours))
    return Difference(name, f"{count} of {at} bytes differ, {first}", count, at) if count else None


def _bytes(place: FolderTensor) -> Iterator[bytes]:
    """Bytes of a stored tensor, in blocks."""
    folder, stored = place
    for offset in range(0, stored.nbytes, STEP_BYTES):
        length = min(STEP_BYTES, stored.nbytes - offset)
        yield folder.read(stored.file, stored.offset + offset, length)


def _compare_tensor(
    a: Side, b: Side, name: str, tolerance: float, progress: Callable[[int], None]
) -> Difference | None:
    if a.tensors[name] != b.tensors[name]:
        return Difference(name, f"shape {list(a.tensors[name])} in {a.url} and {list(b.tensors[name])} in {b.url}")
    count, total, largest, first = 0, 0, 0.0, ""
    for rows in a.blocks(name):
        x, y = _same_type(a, b, name, rows)
        differs = _differs(x, y, tolerance)
        progress(x.nbytes)
        total += x.size
        if not differs.any():
            continue
        wide = [cast(v, "BF16" if v.dtype == np.uint16 else "F32", "F32") for v in (x, y)]
        with np.errstate(invalid="ignore"):
            largest = max(largest, float(np.nanmax(np.abs(wide[0] - wide[1])[differs], initial=0.0)))
        if not count:
            at = tuple(int(i) for i in np.argwhere(differs)[0])
            place = [rows[0] + at[0], *at[1:]]
            first = f"first at {place}: {wide[0][at]:.8g} and {wide[1][at]:.8g}"
        count += int(differs.sum())
    if not count:
        return None
    reason = f"{count} of {total} values differ, {first}, largest difference {largest:.3g}"
    return Difference(name, reason, count, total, largest)


def _same_type(a: Side, b: Side, name: str, rows: Interval) -> tuple[Any, Any]:
    """Rows of both sides: bfloat16 bits if both are bfloat16, otherwise float32."""
    x, y = a.readers().read_rows(name, rows), b.readers().read_rows(name, rows)
    types = a.dtype(name), b.dtype(name)
    if types == ("BF16", "BF16"):
        return x, y
    return cast(x, types[0], "F32"), cast(y, types[1], "F32")


def _differs(x: Any, y: Any, tolerance: float) -> Any:
    if tolerance == 0:
        return x != y if x.dtype == np.uint16 else x.view(np.uint32) != y.view(np.uint32)
    wide = [cast(v, "BF16" if v.dtype == np.uint16 else "F32", "F32") for v in (x, y)]
    with np.errstate(invalid="ignore"):
        close = (np.abs(wide[0] - wide[1]) <= tolerance) | (np.isnan(wide[0]) & np.isnan(wide[1]))
        return ~(close | (wide[0] == wide[1]))


def hashes(side: Side, workers: int, progress: Callable[[int], None]) -> dict[str, str]:
    """BLAKE3 of every tensor's values in their dtype, so that folders of different formats can be compared by hash.

    The dtype is part of the hash: bfloat16 weights and their float32 equivalent have different hashes.
    """
    with ThreadPoolExecutor(workers) as pool:
        return dict(zip(side.names, pool.map(lambda name: _hash(side, name, progress), side.names), strict=True))


def _hash(side: Side, name: str, progress: Callable[[int], None]) -> str:
    from blake3 import blake3

    if name in side.others:
        stored = side.others[name][1]
        dtype, shape = stored.dtype, stored.shape
    else:
        dtype, shape = side.dtype(name), side.tensors[name]
    digest = blake3(f"{dtype} {list(shape)}\n".encode())
    for data in _bytes(side.others[name]) if name in side.others else _values(side, name):
        digest.update(data)
        progress(len(data))
    return digest.hexdigest()


def _values(side: Side, name: str) -> Iterator[memoryview]:
    for rows in side.blocks(name):
        values = np.ascontiguousarray(side.readers().read_rows(name, rows))
        yield values.reshape(-1).view(np.uint8).data


def read_hashes(path: Path) -> dict[str, str]:
    """Read the output of ``mfleet convert inspect --hashes``. Raises UserError if it is anything else."""
    remedy = "make one with `mfleet convert inspect PATH --hashes`"
    found = read_object(path, remedy).get("blake3")
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise UserError(f"{path} is not a file of hashes; {remedy}.")
    return found


def compare_hashes(a: Mapping[str, str], b: Mapping[str, str]) -> list[Difference]:
    """Tensors that differ, or that only one side has."""
    reasons = dict.fromkeys(a.keys() ^ b.keys(), "missing in one of the two")
    reasons |= {name: "different hashes" for name in a.keys() & b.keys() if a[name] != b[name]}
    return [Difference(name, reasons[name]) for name in dict.fromkeys((*a, *b)) if name in reasons]

"""Content of output files, produced on demand from a source: copied, decoded, gathered, cast or quantised."""

from __future__ import annotations

import bisect
import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_fleet.convert.plan import Content
from megatron_fleet.storage.folder import Readable
from megatron_fleet.weights.floats import cast
from megatron_fleet.weights.hf_folder import ITEM_BYTES
from megatron_fleet.weights.hf_model import BLOCK, GROUP
from megatron_fleet.weights.hf_rows import Fp8Weights, Int4Weights, PerThread, RowReader
from megatron_fleet.weights.mapping import Interval
from megatron_fleet.weights.quant import fp8, int4

STEP_BYTES = 4 << 20
"""Source bytes in memory at once; quantising FP8 takes whole blocks of rows."""


@dataclass(frozen=True, slots=True)
class FileRange:
    """``nbytes`` of a file, unchanged."""

    folder: Readable
    file: str
    offset: int
    nbytes: int

    def fill(self, start: int, out: memoryview) -> None:
        self.folder.read_into(self.file, self.offset + start, out)


class ProducedRows(ABC):
    """Rows produced one block at a time by `make`, which subclasses define."""

    __slots__ = ("_count", "_granule", "_row_bytes")

    def __init__(self, count: int, row_bytes: int, granule: int = 1) -> None:
        """``granule``: number of rows that must be produced together."""
        self._count, self._row_bytes, self._granule = count, row_bytes, granule

    @property
    def nbytes(self) -> int:
        return self._count * self._row_bytes

    @abstractmethod
    def make(self, rows: Interval) -> npt.NDArray[Any]:
        """Produce rows. ``rows`` begin at a multiple of the granule."""

    def source_row_bytes(self) -> int:
        """Source bytes read per row, for limiting memory."""
        return self._row_bytes

    def fill(self, start: int, out: memoryview) -> None:
        granule, width, end = self._granule, self._row_bytes, start + len(out)
        step = max(1, STEP_BYTES // max(1, self.source_row_bytes()) // granule) * granule
        row, needed = start // width // granule * granule, -(-end // width)
        while row < needed:
            last = min(row + step, self._count, -(-needed // granule) * granule)
            made = np.ascontiguousarray(self.make((row, last))).reshape(-1).view(np.uint8)
            a, b = max(start, row * width), min(end, last * width)
            out[a - start : b - start] = made[a - row * width : b - row * width].data
            row = last


class TensorRows(ProducedRows):
    """Rows of an HF tensor as floats of a given dtype."""

    __slots__ = ("_dtype", "_first", "_offset", "_readers", "_tensor")

    def __init__(
        self,
        readers: PerThread[RowReader],
        tensor: str,
        rows: Interval,
        columns: int,
        dtype: str,
        offset: float = 0.0,
    ) -> None:
        """``offset`` is added to the values."""
        super().__init__(rows[1] - rows[0], columns * ITEM_BYTES[dtype])
        self._readers, self._tensor, self._first, self._dtype = readers, tensor, rows[0], dtype
        self._offset = np.float32(offset)

    def make(self, rows: Interval) -> npt.NDArray[Any]:
        reader = self._readers()
        values = reader.read_rows(self._tensor, (self._first + rows[0], self._first + rows[1]))
        source = reader.dtype(self._tensor)
        if self._offset:
            values, source = cast(values, source, "F32") + self._offset, "F32"
        return cast(values, source, self._dtype)


class Joined:
    """Contents one after another, as one: the parts of a tensor that stacks experts."""

    def __init__(self, parts: Sequence[Content]) -> None:
        self._parts = parts
        self._ends = list(itertools.accumulate(part.nbytes for part in parts))

    @property
    def nbytes(self) -> int:
        return self._ends[-1]

    def fill(self, start: int, out: memoryview) -> None:
        end, k = start + len(out), bisect.bisect_right(self._ends, start)
        while start < end:
            begins, last = self._ends[k] - self._parts[k].nbytes, min(end, self._ends[k])
            self._parts[k].fill(start - begins, out[len(out) - (end - start) : len(out) - (end - last)])
            start, k = last, k + 1


class Int4Codes(ProducedRows):
    """INT4 codes, stored as ``weight_packed``."""

    __slots__ = ("_weights",)

    def __init__(self, weights: Int4Weights) -> None:
        super().__init__(weights.shape[0], weights.shape[1] // 2)
        self._weights = weights

    def source_row_bytes(self) -> int:
        return self._weights.shape[1] * 2

    def make(self, rows: Interval) -> npt.NDArray[Any]:
        weights, scales = self._weights.quantise(rows)
        packed = np.empty((rows[1] - rows[0], self._weights.shape[1] // 8), np.int32)
        int4.quantize(weights, scales, packed)
        return packed


class Int4Scales(ProducedRows):
    """INT4 scales, stored as ``weight_scale``."""

    __slots__ = ("_weights",)

    def __init__(self, weights: Int4Weights) -> None:
        super().__init__(weights.shape[0], weights.shape[1] // GROUP * 2)
        self._weights = weights

    def source_row_bytes(self) -> int:
        return self._weights.shape[1] * 2

    def make(self, rows: Interval) -> npt.NDArray[Any]:
        return self._weights.quantise(rows)[1]


class Fp8Codes(ProducedRows):
    """E4M3 codes, stored as ``weight``."""

    __slots__ = ("_weights",)

    def __init__(self, weights: Fp8Weights) -> None:
        super().__init__(weights.shape[0], weights.shape[1], granule=BLOCK)
        self._weights = weights

    def source_row_bytes(self) -> int:
        return self._weights.shape[1] * 2

    def make(self, rows: Interval) -> npt.NDArray[Any]:
        weights, scales = self._weights.quantise((rows[0] // BLOCK, -(-rows[1] // BLOCK)))
        codes = np.empty(weights.shape, np.uint8)
        fp8.quantize(weights, scales, codes)
        return codes


class Fp8Scales(ProducedRows):
    """FP8 scales, stored as ``weight_scale_inv``; each row is a row of blocks."""

    __slots__ = ("_weights",)

    def __init__(self, weights: Fp8Weights) -> None:
        rows, columns = fp8.scale_shape(*weights.shape)
        super().__init__(rows, columns * ITEM_BYTES[weights.scales_dtype])
        self._weights = weights

    def source_row_bytes(self) -> int:
        return self._weights.shape[1] * 2 * BLOCK

    def make(self, rows: Interval) -> npt.NDArray[Any]:
        return cast(self._weights.quantise(rows)[1], "F32", self._weights.scales_dtype)

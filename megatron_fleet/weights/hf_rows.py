"""Rows of HF tensors as arrays: read, decoded where they are quantised, and quantised again. numpy only."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from megatron_fleet.config.errors import UserError
from megatron_fleet.storage.folder import Readable, aligned_buffer
from megatron_fleet.weights.floats import cast, cast_up, numpy_type
from megatron_fleet.weights.hf_folder import StoredTensor
from megatron_fleet.weights.hf_model import BLOCK, Fp8, HfModel, Int4, Plain
from megatron_fleet.weights.mapping import Interval
from megatron_fleet.weights.quant import fp8, int4


class RowReader(Protocol):
    """Reads rows of HF tensors as floats: `HfReader` or `CheckpointReader`."""

    def dtype(self, tensor: str) -> str: ...

    def read_rows(self, tensor: str, rows: Interval) -> npt.NDArray[Any]: ...


_T = TypeVar("_T", covariant=True)


class PerThread(Generic[_T]):
    """Creates one object per thread; readers reuse their buffers."""

    def __init__(self, make: Callable[[], _T]) -> None:
        self._make, self._local = make, threading.local()

    def __call__(self) -> _T:
        if not hasattr(self._local, "value"):
            self._local.value = self._make()
        return self._local.value


class HfReader:
    """Reads rows of the tensors of one folder. Not thread-safe: it reuses its buffers.

    Attributes:
        bytes_read: total bytes read from the files.
    """

    def __init__(self, model: HfModel) -> None:
        self._model = model
        self._buffers: dict[str, memoryview] = {}
        self._scales: tuple[str, npt.NDArray[np.float32]] | None = None
        self.bytes_read = 0

    def dtype(self, tensor: str) -> str:
        """Dtype of a tensor's values, as a safetensors name: quantised tensors decode to BF16."""
        encoding = self._model.encodings[tensor]
        return encoding.stored.dtype if isinstance(encoding, Plain) else "BF16"

    def width(self, tensor: str) -> int:
        """Number of values in one row."""
        return math.prod(self._model.table.tensors[tensor][1:])

    def read_rows(self, tensor: str, rows: Interval) -> npt.NDArray[Any]:
        """Rows ``[n]`` or ``[n, columns]``: float32, or the bits of 16-bit floats. Valid until the next call."""
        encoding = self._model.encodings[tensor]
        if isinstance(encoding, Plain):
            return self._read("plain", encoding.stored, rows)
        columns = self._model.table.tensors[tensor][1]
        count = rows[1] - rows[0]
        out = np.frombuffer(self._buffer("decoded", 2 * count * columns), np.uint16).reshape(count, columns)
        if isinstance(encoding, Fp8):
            codes = self._read("codes", encoding.codes, rows)
            fp8.dequantize(codes, self._all_scales(tensor, encoding), out, first_row=rows[0])
        elif isinstance(encoding, Int4):
            packed = self._read("codes", encoding.packed, rows)
            int4.dequantize(packed, self._read("scales", encoding.scales, rows), out)
        return out

    def _read(self, buffer: str, stored: StoredTensor, rows: Interval) -> npt.NDArray[Any]:
        row_bytes = stored.nbytes // stored.shape[0] if stored.shape[0] else 0
        view = self._buffer(buffer, (rows[1] - rows[0]) * row_bytes)
        self._model.folder.read_into(stored.file, stored.offset + rows[0] * row_bytes, view)
        self.bytes_read += len(view)
        return np.frombuffer(view, numpy_type(stored.dtype)).reshape(rows[1] - rows[0], *stored.shape[1:])

    def _all_scales(self, tensor: str, encoding: Fp8) -> npt.NDArray[np.float32]:
        """All scales of a tensor: one per 16,384 values, so they are read once instead of by rows."""
        if self._scales is None or self._scales[0] != tensor:
            stored = encoding.scales
            view = memoryview(bytearray(stored.nbytes))
            self._model.folder.read_into(stored.file, stored.offset, view)
            self.bytes_read += len(view)
            values = np.frombuffer(view, numpy_type(stored.dtype)).reshape(stored.shape)
            self._scales = tensor, cast(values, stored.dtype, "F32")
        return self._scales[1]

    def _buffer(self, name: str, nbytes: int) -> memoryview:
        if len(self._buffers.get(name, b"")) < nbytes:
            self._buffers[name] = aligned_buffer(nbytes)
        return self._buffers[name][:nbytes]


@dataclass(frozen=True, slots=True)
class Hint:
    """Location of the scales with which a tensor was originally quantised."""

    folder: Readable
    file: str
    offset: int
    shape: tuple[int, ...]

    def rows(self, rows: Interval, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        row_bytes = math.prod(self.shape[1:]) * np.dtype(dtype).itemsize
        view = memoryview(bytearray((rows[1] - rows[0]) * row_bytes))
        self.folder.read_into(self.file, self.offset + rows[0] * row_bytes, view)
        return np.frombuffer(view, dtype).reshape(rows[1] - rows[0], *self.shape[1:])


class Int4Weights:
    """A tensor quantised to INT4 groups of 32; keeps the source's scales where they still hold the weights."""

    def __init__(self, readers: PerThread[RowReader], tensor: str, shape: tuple[int, ...], hint: Hint | None) -> None:
        self.readers, self.tensor, self.shape, self.hint = readers, tensor, shape, hint

    def quantise(self, rows: Interval) -> tuple[npt.NDArray[np.uint16], npt.NDArray[np.uint16]]:
        """BF16 weights, and the scales to quantise them with. Raises UserError for a NaN or infinite weight."""
        weights = _bfloat16(self.readers, self.tensor, rows)
        hint = None if self.hint is None else self.hint.rows(rows, np.uint16)
        return weights, int4_scales(self.tensor, weights, hint)


class Fp8Weights:
    """A tensor quantised to E4M3 in 128×128 blocks; keeps the source's scales where they still hold the weights.

    Attributes:
        scales_dtype: type in which the scales are stored, one of ``FLOATS``, also those of ``hint``.
    """

    def __init__(
        self,
        readers: PerThread[RowReader],
        tensor: str,
        shape: tuple[int, ...],
        hint: Hint | None,
        power_of_two: bool,
        scales_dtype: str = "F32",
    ) -> None:
        self.readers, self.tensor, self.shape, self.hint = readers, tensor, shape, hint
        self._power_of_two, self.scales_dtype = power_of_two, scales_dtype

    def quantise(self, blocks: Interval) -> tuple[npt.NDArray[np.uint16], npt.NDArray[np.float32]]:
        """BF16 weights of some block rows, and their scales. Raises UserError for a NaN or infinite weight."""
        rows = blocks[0] * BLOCK, min(blocks[1] * BLOCK, self.shape[0])
        weights = _bfloat16(self.readers, self.tensor, rows)
        hint = None if self.hint is None else self.hint.rows(blocks, numpy_type(self.scales_dtype))
        return weights, fp8_scales(self.tensor, weights, hint, self._power_of_two, self.scales_dtype)


def int4_scales(
    tensor: str, weights: npt.NDArray[np.uint16], hint: npt.NDArray[np.uint16] | None
) -> npt.NDArray[np.uint16]:
    """Choose the scales of BF16 weights, see `int4.choose_scales`. Raises UserError for a NaN or infinite weight."""
    scales, exact = int4.choose_scales(weights, hint)
    if not exact.all() and ((scales[~exact] & 0x7F80) == 0x7F80).any():
        raise not_finite(tensor)
    return scales


def fp8_scales(
    tensor: str, weights: npt.NDArray[np.uint16], hint: npt.NDArray[Any] | None, power_of_two: bool, stored: str
) -> npt.NDArray[np.float32]:
    """Choose the scales of BF16 weights in whole blocks: the hint where it holds them, otherwise by the declared rule.

    Args:
        hint: the folder's scales, in the type ``stored`` (the bits of 16-bit floats).
        stored: type in which the scales will be stored, one of ``FLOATS``: it has all of the values that are returned.
            Those by the rule are rounded up, so that the largest magnitude of a block stays in E4M3's range.

    Raises:
        UserError: a weight is NaN or infinite.
    """
    if hint is None:
        scales = fp8.block_scales(weights, power_of_two=power_of_two)
    else:
        scales, _ = fp8.choose_scales(weights, cast(hint, stored, "F32"), power_of_two=power_of_two)
    scales = cast(cast_up(scales, stored), stored, "F32")
    if not np.isfinite(scales).all():
        raise not_finite(tensor)
    return scales


def _bfloat16(readers: PerThread[RowReader], tensor: str, rows: Interval) -> npt.NDArray[np.uint16]:
    reader = readers()
    return cast(reader.read_rows(tensor, rows), reader.dtype(tensor), "BF16")


def not_finite(tensor: str) -> UserError:
    """Make the error for a tensor that cannot be quantised."""
    return UserError(f"{tensor} holds NaN or infinity, which no quantised form has; was the training run healthy?")

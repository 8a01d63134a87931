"""Reads rows of an HF folder's tensors as floats, decoding quantised ones. numpy only."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_fleet.storage.folder import aligned_buffer
from megatron_fleet.weights.floats import numpy_type
from megatron_fleet.weights.hf_folder import StoredTensor
from megatron_fleet.weights.hf_model import Fp8, HfModel, Int4, Plain
from megatron_fleet.weights.mapping import Span
from megatron_fleet.weights.quant import fp8, int4


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

    def read_rows(self, tensor: str, rows: Span) -> npt.NDArray[Any]:
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

    def _read(self, buffer: str, stored: StoredTensor, rows: Span) -> npt.NDArray[Any]:
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
            self._scales = tensor, np.frombuffer(view, np.float32).reshape(stored.shape)
        return self._scales[1]

    def _buffer(self, name: str, nbytes: int) -> memoryview:
        if len(self._buffers.get(name, b"")) < nbytes:
            self._buffers[name] = aligned_buffer(nbytes)
        return self._buffers[name][:nbytes]

"""Reads rows of HF tensors from a Megatron ``torch_dist`` checkpoint, regardless of its sharding."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_fleet.config.errors import UserError
from megatron_fleet.storage.folder import Folder, aligned_buffer
from megatron_fleet.weights.floats import FLOATS, cast, numpy_type, widest
from megatron_fleet.weights.hf_folder import INDEX, ITEM_BYTES, SINGLE, as_folder
from megatron_fleet.weights.mapping import Interval, Matrix, Piece, WeightTable, stack_key
from megatron_fleet.weights.torch_dist.container import HEAD_BYTES, data_start
from megatron_fleet.weights.torch_dist.folder import locate
from megatron_fleet.weights.torch_dist.index import CheckpointIndex, Chunk, ChunkedTensor, read_index

Lead = tuple[int, ...]


class MegatronCheckpoint:
    """An opened checkpoint.

    Attributes:
        folder: folder at the given address.
        path: path of the checkpoint inside it: ``release/``, ``iter_0000100/`` or empty.
        url: address of the checkpoint itself.
        sizes: name → bytes of its files.
    """

    def __init__(self, place: Folder | Path | str) -> None:
        """Read the index. Raises UserError if there is no complete ``torch_dist`` checkpoint."""
        self.folder = as_folder(place)
        sizes = self.folder.sizes()
        if INDEX in sizes or SINGLE in sizes:
            raise UserError(f"{self.folder.url} is an HF folder; give the folder of a Megatron checkpoint.")
        inside = locate(self.folder.read, sizes, self.folder.url)
        self.path = f"{inside}/" if inside else ""
        self.sizes = {name.removeprefix(self.path): n for name, n in sizes.items() if name.startswith(self.path)}
        self.url = f"{self.folder.url}/{inside}" if inside else self.folder.url
        self.index: CheckpointIndex = read_index(self.read, self.sizes, self.url)

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        """Read bytes of one of its files; without a length, everything from ``offset`` on."""
        return self.folder.read(self.path + name, offset, length)


class StoredMatrices:
    """Locations of a weight table's matrices in a checkpoint. Immutable, so reader threads can share it."""

    def __init__(self, checkpoint: MegatronCheckpoint, table: WeightTable) -> None:
        """Locate every matrix.

        Raises:
            UserError: one is missing or has another shape, or the checkpoint contains weights that are not part of the
                model.
        """
        self.checkpoint, self.table = checkpoint, table
        self._by_lead: dict[str, dict[Lead, list[Chunk]]] = {}
        self._tensors: dict[str, ChunkedTensor] = {}
        self._sources: dict[str, list[tuple[Matrix, Piece, str, Lead]]] = {name: [] for name in table.tensors}
        for matrix in table.matrices():
            key, lead = self._locate(matrix)
            for piece in matrix.pieces:
                assert piece.tensor is not None  # a matrix without padding
                self._sources[piece.tensor].append((matrix, piece, key, lead))
        self._refuse_unknown()

    def dtype(self, tensor: str) -> str:
        """Dtype of an HF tensor's values; float32 if its parts differ, or Megatron's differ by an offset."""
        if tensor in self.table.offsets:
            return "F32"
        return self.written_dtype(tensor)

    def written_dtype(self, tensor: str) -> str:
        """Dtype of Megatron's values in the checkpoint."""
        return widest([self._tensors[key].dtype for _, _, key, _ in self._sources[tensor]])

    def pieces(self, tensor: str, rows: Interval) -> list[tuple[Interval, str, Lead, Interval]]:
        """Sources of an HF tensor's rows: (rows relative to the first; key; leading indices; rows of the matrix)."""
        out = []
        for _, piece, key, lead in self._sources[tensor]:
            a, b = max(rows[0], piece.tensor_rows[0]), min(rows[1], piece.tensor_rows[1])
            if a < b:
                start = piece.rows[0] + a - piece.tensor_rows[0]
                out.append(((a - rows[0], b - rows[0]), key, lead, (start, start + b - a)))
        return out

    def chunks(self, key: str, lead: Lead) -> list[Chunk]:
        """The chunks that hold a matrix."""
        return self._by_lead[key][lead]

    def stored_dtype(self, key: str) -> str:
        return self._tensors[key].dtype

    def _locate(self, matrix: Matrix) -> tuple[str, Lead]:
        """The key and leading indices under which a matrix is stored, in whichever form the writer chose."""
        expert = () if matrix.expert is None else (matrix.expert,)
        for numbered in (matrix.key, *matrix.aliases):
            stacked, layer = stack_key(numbered)
            for key, lead in ((numbered, expert), (stacked, (layer, *expert) if layer is not None else None)):
                stored = self.checkpoint.index.tensors.get(key)
                if stored is not None and lead is not None and len(stored.shape) == len(lead) + len(matrix.shape):
                    self._check(key, stored, matrix, lead)
                    return key, lead
        raise UserError(f"{self.checkpoint.url}: tensor {matrix.key} is missing; config.json asks for it.")

    def _check(self, key: str, stored: ChunkedTensor, matrix: Matrix, lead: Lead) -> None:
        where, found = self.checkpoint.url, stored.shape[len(lead) :]
        experts = () if matrix.expert is None else (self.table.model.experts,)
        counts = (self.table.model.layers, *experts) if len(lead) > len(experts) else experts
        padded = matrix.rule.vocabulary and found[1:] == matrix.shape[1:] and found[0] >= matrix.shape[0]
        if (found != matrix.shape and not padded) or stored.shape[: len(lead)] != counts:
            raise UserError(
                f"{where}: tensor {key} has shape {list(stored.shape)}; config.json asks for "
                f"{[*counts, *matrix.shape]}."
            )
        if stored.dtype not in FLOATS:
            raise UserError(f"{where}: tensor {key} is stored as {stored.dtype}; only {', '.join(FLOATS)} can be read.")
        if key not in self._by_lead:
            self._tensors[key] = stored
            grouped: dict[Lead, list[Chunk]] = {}
            for chunk in stored.chunks:
                spans = (range(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes[: len(lead)], strict=False))
                for index in itertools.product(*spans):
                    grouped.setdefault(index, []).append(chunk)
            self._by_lead[key] = grouped

    def _refuse_unknown(self) -> None:
        """Raise UserError if the checkpoint has a weight that is not part of the model."""
        for key in self.checkpoint.index.tensors:
            if key in self._tensors or key.startswith("rng_state"):
                continue
            known = self._by_lead.keys() & set(self._aliases_of(key))
            if not known:
                raise UserError(
                    f"{self.checkpoint.url}: tensor {key} is not part of the model that config.json describes; use the "
                    f"config.json that belongs to the checkpoint."
                )

    def _aliases_of(self, key: str) -> list[str]:
        """Other keys for the content of ``key``; the same content is stored under several."""
        stacked = stack_key(key)[0] == key and key.startswith("decoder.layers.")
        lead: Lead = (0,) if stacked else ()
        if ".experts.experts." in key:
            lead = (*lead, 0)
        try:
            matrix = self.table.find(key, lead)
        except UserError:
            return []
        names = (matrix.key, *matrix.aliases)
        return [*names, *(stack_key(name)[0] for name in names)]


class CheckpointReader:
    """Reads rows of HF tensors. Not thread-safe: it reuses its buffers."""

    def __init__(
        self,
        matrices: StoredMatrices,
        originals: Mapping[str, Callable[[Interval], npt.NDArray[np.float32]]] | None = None,
    ) -> None:
        """``originals``: readers of tensors' values before an offset was added; used where they still agree."""
        self._matrices, self._originals = matrices, originals or {}
        self._folder, self._path = matrices.checkpoint.folder, matrices.checkpoint.path
        self._buffers: dict[str, memoryview] = {}
        self._starts: dict[Chunk, int] = {}

    def dtype(self, tensor: str) -> str:
        """Dtype of the rows, as a safetensors name."""
        return self._matrices.dtype(tensor)

    def read_rows(self, tensor: str, rows: Interval) -> npt.NDArray[Any]:
        """Rows ``[n]`` or ``[n, columns]``: float32, or the bits of 16-bit floats. Valid until the next call."""
        shape = (rows[1] - rows[0], *self._matrices.table.tensors[tensor][1:])
        view = self._buffer("rows", math.prod(shape) * ITEM_BYTES[self.dtype(tensor)])
        self.read_into(tensor, rows, view)
        return np.frombuffer(view, numpy_type(self.dtype(tensor))).reshape(shape)

    def read_into(self, tensor: str, rows: Interval, view: memoryview) -> None:
        """Same as `read_rows`, into memory of exactly the right size."""
        dtype = self.dtype(tensor)
        shape = (rows[1] - rows[0], *self._matrices.table.tensors[tensor][1:])
        out = np.frombuffer(view, numpy_type(dtype)).reshape(shape)
        for (first, last), key, lead, inside in self._matrices.pieces(tensor, rows):
            stored = self._matrices.stored_dtype(key)
            for chunk in self._matrices.chunks(key, lead):
                self._copy(out[first:last], dtype, chunk, lead, inside, stored)
        offset = self._matrices.table.offsets.get(tensor)
        if offset:
            self._without_offset(out, tensor, rows, np.float32(offset))

    def _without_offset(self, out: npt.NDArray[Any], tensor: str, rows: Interval, offset: np.float32) -> None:
        """Subtract the offset, which may round; where the original value gives the same, it is that."""
        out -= offset
        if tensor not in self._originals:
            return
        original, written = self._originals[tensor](rows), self._matrices.written_dtype(tensor)
        again = cast(cast(original + offset, "F32", written), written, "F32") - offset
        np.copyto(out, original, where=again == out)

    def _copy(self, out: npt.NDArray[Any], dtype: str, chunk: Chunk, lead: Lead, rows: Interval, stored: str) -> None:
        """Copy the part of a matrix's rows that a chunk holds into ``out``, whose values are ``dtype``."""
        n = len(lead)
        top, height = chunk.offsets[n], chunk.sizes[n]
        a, b = max(rows[0], top), min(rows[1], top + height)
        if a >= b:
            return
        width = math.prod(chunk.sizes[n + 1 :])
        row_bytes = width * ITEM_BYTES[stored]
        before = 0
        for index, offset, size in zip(lead, chunk.offsets, chunk.sizes, strict=False):
            before = before * size + index - offset
        start = self._start(chunk, stored) + (before * height + a - top) * row_bytes
        place = out[a - rows[0] : b - rows[0]]
        if stored == dtype and width == math.prod(out.shape[1:]):
            self._folder.read_into(self._path + chunk.file, start, place.data.cast("B"))
            return
        view = self._buffer("chunk", (b - a) * row_bytes)
        self._folder.read_into(self._path + chunk.file, start, view)
        values = cast(np.frombuffer(view, numpy_type(stored)), stored, dtype)
        if out.ndim == 1:
            place[:] = values
        elif width == math.prod(out.shape[1:]):
            place[:] = values.reshape(place.shape)
        else:
            left = chunk.offsets[n + 1]
            place[:, left : left + width] = values.reshape(b - a, width)

    def _start(self, chunk: Chunk, dtype: str) -> int:
        """Offset of a chunk's data in its file. Raises UserError if the file holds something else there."""
        if chunk not in self._starts:
            if len(self._starts) > 4096:
                self._starts.clear()
            name = self._path + chunk.file
            where = f"{self._folder.url}/{name}"
            head = bytearray(min(HEAD_BYTES, chunk.length))
            self._folder.read_into(name, chunk.offset, memoryview(head))
            self._starts[chunk] = data_start(bytes(head), chunk, dtype, where)
        return self._starts[chunk]

    def _buffer(self, name: str, nbytes: int) -> memoryview:
        if len(self._buffers.get(name, b"")) < nbytes:
            self._buffers[name] = aligned_buffer(nbytes)
        return self._buffers[name][:nbytes]

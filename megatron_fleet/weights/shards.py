"""This rank's part of a Megatron model, as rows and columns of the matrices of the weight table; loading it from HF.

Megatron itself defines the part: ``sharded_state_dict`` gives key, offset and shape of every local tensor under any
tensor, pipeline (virtual or not), expert and expert-tensor parallelism and for any layer spec. This module needs no
knowledge of the parallel layout. Read from Megatron-Core 0.16 to 0.19: ``dist_checkpointing/mapping.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from megatron_fleet.config.errors import UserError
from megatron_fleet.storage.folder import Folder
from megatron_fleet.storage.open import open_folder
from megatron_fleet.weights.hf_model import open_model
from megatron_fleet.weights.hf_rows import HfReader
from megatron_fleet.weights.mapping import Interval, Matrix, Piece, WeightTable

if TYPE_CHECKING:
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

BLOCK_VALUES = 8 << 20
"""Values in memory at once while loading."""
_TORCH = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


@dataclass(frozen=True, slots=True)
class LocalTensor:
    """``matrix[rows, cols]`` as stored in a parameter of this rank.

    Attributes:
        rows: rows of the matrix; rows after its last one are padding.
        cols: columns of the matrix; ``None`` = all, and for 1-d matrices.
        parameter: parameter whose memory holds it.
    """

    matrix: Matrix
    rows: Interval
    cols: Interval | None
    parameter: torch.Tensor
    _geometry: tuple[tuple[int, ...], tuple[int, ...], int]

    @property
    def first_row(self) -> int:
        """Index of its first row in the parameter."""
        _, stride, start = self._geometry
        return (start - self.parameter.storage_offset()) // stride[0]

    def view(self) -> torch.Tensor:
        """The local values, detached; writing to them changes the parameter.

        Created from the parameter on every call, because data-parallel wrappers and offloading move its memory.
        """
        return self.parameter.detach().as_strided(*self._geometry)


def local_tensors(model_chunks: Sequence[nn.Module], table: WeightTable) -> list[LocalTensor]:
    """All tensors of the model that this rank holds. Megatron's process groups must exist.

    Args:
        model_chunks: this rank's unwrapped GPTModel chunks.

    Raises:
        UserError: model and table do not match.
    """
    return [_place(entry, parameter, table) for chunk in model_chunks for entry, parameter in _sharded_tensors(chunk)]


def _sharded_tensors(chunk: nn.Module) -> Iterator[tuple[ShardedTensor, torch.Tensor]]:
    """Megatron's descriptions of the local tensors, each with the parameter (or buffer) that holds its memory."""
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    metadata = {"dp_cp_group": group, "singleton_local_shards": False}
    described: Any = chunk
    for entry in described.sharded_state_dict(metadata=metadata).values():
        if isinstance(entry, ShardedTensorFactory):
            built = entry.build()
            for part in built if isinstance(built, list) else built.values():
                yield part, entry.data
        elif isinstance(entry, ShardedTensor):
            assert entry.data is not None  # the description of a live model
            yield entry, entry.data


def _place(entry: ShardedTensor, parameter: torch.Tensor, table: WeightTable) -> LocalTensor:
    lead = entry.prepend_axis_num
    matrix = table.find(entry.key, tuple(entry.global_offset[:lead]))
    data, offset = entry.data, entry.global_offset[lead:]
    expected, whole = matrix.shape, tuple(entry.global_shape[lead:])
    padded = matrix.rule.vocabulary and whole[0] >= expected[0] and whole[1:] == expected[1:]
    if whole != expected and not padded:
        raise UserError(
            f"Megatron tensor {matrix.key} has shape {list(whole)}; config.json asks for {list(expected)}: the model "
            f"was built from another configuration."
        )
    rows = (offset[0], offset[0] + data.shape[0])
    cols = (offset[1], offset[1] + data.shape[1]) if data.dim() == 2 else None
    start = data.storage_offset()
    return LocalTensor(
        matrix,
        rows,
        None if cols is None or cols == (0, expected[1]) else cols,
        parameter,
        (tuple(data.shape), data.stride(), start),
    )


@torch.no_grad()
def load_hf(model_chunks: Sequence[nn.Module], hf_dir: Folder | Path | str) -> int:
    """Load this rank's shards from a safetensors folder (local or S3), dequantised and cast to the parameter dtypes.

    Not a collective: ranks read independently. An optimizer with its own copy of the parameters must reload them
    afterwards. Vocabulary padding rows are set to 0.

    Args:
        model_chunks: this rank's unwrapped GPTModel chunks; Megatron's process groups must exist.
        hf_dir: folder with ``config.json`` and ``model.safetensors`` (or an index and its files).

    Returns:
        Bytes read.

    Raises:
        UserError: the folder and the model do not match; raised before any parameter is modified.
    """
    # Ranks on one machine read the same rows if a matrix is split by columns, and the same norms.
    folder = open_folder(hf_dir, cached=True) if isinstance(hf_dir, Path | str) else hf_dir
    model = open_model(folder)
    targets = local_tensors(model_chunks, model.table)
    pieces = [target.matrix.restrict(target.rows) for target in targets]
    reader = HfReader(model)
    for target, its_pieces in zip(targets, pieces, strict=True):
        view = target.view()
        for piece in its_pieces:
            rows = view[slice(*piece.rows)]
            if piece.tensor is None:
                rows.zero_()
            else:
                _fill(rows, piece, target.cols, reader)
                if target.matrix.rule.offset:
                    rows.add_(target.matrix.rule.offset)
    return reader.bytes_read


def _fill(out: torch.Tensor, piece: Piece, cols: Interval | None, reader: HfReader) -> None:
    """Copy a piece into ``out`` in blocks of rows. Reads whole rows even if only some columns are needed: a rank's part
    of a row is too short for a separate read."""
    assert piece.tensor is not None  # the caller skips padding
    dtype = _TORCH[reader.dtype(piece.tensor)]
    width = reader.width(piece.tensor)
    step = max(1, BLOCK_VALUES // width)
    first, last = piece.tensor_rows
    for row in range(first, last, step):
        end = min(row + step, last)
        values = torch.from_numpy(reader.read_rows(piece.tensor, (row, end)))
        values = values.view(dtype) if values.dtype == torch.uint16 else values
        place = out[row - first : end - first]
        place.copy_(values if cols is None else values[:, slice(*cols)])

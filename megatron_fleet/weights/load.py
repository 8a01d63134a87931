"""An HF folder straight into this rank's Megatron shards, in any layout: each rank reads only its own rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from megatron_fleet.storage.folder import Folder
from megatron_fleet.storage.open import open_folder
from megatron_fleet.weights.hf_model import open_model
from megatron_fleet.weights.hf_reader import HfReader
from megatron_fleet.weights.mapping import Piece, Span
from megatron_fleet.weights.shards import local_tensors

BLOCK_VALUES = 8 << 20
"""Values in memory at one time."""
_TORCH = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


@torch.no_grad()
def load_hf(model_chunks: Sequence[nn.Module], hf_dir: Folder | Path | str) -> int:
    """Fill this rank's shards from a safetensors folder (local or S3), dequantising, casting to each parameter's dtype.

    No collective: ranks read independently. An optimizer that keeps its own copy of the parameters must be told to
    take them over afterwards. Rows that pad the vocabulary are set to 0.

    Args:
        model_chunks: this rank's GPTModel chunks, unwrapped; Megatron's process groups must exist.
        hf_dir: folder with ``config.json`` and ``model.safetensors`` (or an index and its files).

    Returns:
        Bytes read.

    Raises:
        UserError: the folder and the model do not fit; raised before any parameter is touched.
    """
    # Ranks of one machine read the same rows where a matrix is split by columns, and the same norms.
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
    return reader.bytes_read


def _fill(out: torch.Tensor, piece: Piece, cols: Span | None, reader: HfReader) -> None:
    """Copy a piece into ``out``, some rows at a time. Whole rows are read also where only some columns are wanted: a
    rank's part of a row is too short to be read by itself."""
    assert piece.tensor is not None  # padding is none of ours
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

"""Load an HF folder directly into this rank's Megatron shards, in any layout; each rank reads only its own rows."""

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
"""Values in memory at once."""
_TORCH = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


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


def _fill(out: torch.Tensor, piece: Piece, cols: Span | None, reader: HfReader) -> None:
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

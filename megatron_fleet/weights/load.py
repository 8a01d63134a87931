"""An HF folder straight into this rank's Megatron shards: each rank reads only its own rows."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from megatron_fleet.config.errors import UserError
from megatron_fleet.weights.hf_folder import StoredTensor, check_tensors, read_config, read_headers
from megatron_fleet.weights.mapping import Piece, WeightTable


def global_parameters(model_chunks: Sequence[nn.Module]) -> dict[str, nn.Parameter]:
    """The parameters of this rank's GPTModel chunks by Megatron name, with *global* layer indices.

    Megatron numbers a chunk's layers from 0; each layer module knows its place in the model (``layer_number``, from 1).
    """
    parameters: dict[str, nn.Parameter] = {}
    for chunk in model_chunks:
        for name, parameter in chunk.named_parameters():
            match = re.match(r"(.*\.layers)\.(\d+)\.(.*)", name)
            if match:
                layer: Any = chunk.get_submodule(f"{match[1]}.{match[2]}")
                name = f"{match[1]}.{layer.layer_number - 1}.{match[3]}"
            parameters[name] = parameter
    return parameters


def local_pieces(
    table: WeightTable, name: str, parameter: torch.Tensor, tp_rank: int, tp_size: int
) -> tuple[Piece, ...]:
    """The pieces of one local parameter. Raises UserError when its shape is not the table's."""
    padded_vocab = parameter.shape[0] * tp_size if table.is_vocabulary(name) else None
    expected = table.local_shape(name, tp_size, padded_vocab)
    if tuple(parameter.shape) != expected:
        raise UserError(
            f"Megatron parameter {name} has shape {list(parameter.shape)}; config.json asks for {list(expected)} "
            f"under parallel.tensor={tp_size}: the model was built from another configuration."
        )
    return table.pieces(name, tp_rank, tp_size, padded_vocab)


@torch.no_grad()
def load_hf(model_chunks: Sequence[nn.Module], hf_dir: Path | str, *, tp_rank: int, tp_size: int) -> None:
    """Fill this rank's shards from a safetensors folder, casting to each parameter's dtype.

    No collective: ranks read independently. An optimizer that keeps its own copy of the parameters must be told to
    take them over afterwards. Rows that pad the vocabulary are set to 0.

    Args:
        model_chunks: this rank's GPTModel chunks, unwrapped.
        hf_dir: folder with ``config.json`` and ``model.safetensors`` (or an index and its files).

    Raises:
        UserError: the folder and the model do not fit; raised before any parameter is touched.
    """
    table = WeightTable(read_config(hf_dir))
    stored = read_headers(hf_dir)
    check_tensors(hf_dir, table, stored)
    parameters = global_parameters(model_chunks)
    plan = {name: local_pieces(table, name, p, tp_rank, tp_size) for name, p in parameters.items()}
    reader = _Reader(stored)
    for name, pieces in plan.items():
        for piece in pieces:
            rows = parameters[name][piece.rows[0] : piece.rows[1]]
            if piece.tensor is None:
                rows.zero_()
            else:
                rows.copy_(reader.read(piece))


class _Reader:
    """Row and column ranges of stored tensors; every file is mapped once."""

    def __init__(self, stored: dict[str, StoredTensor]) -> None:
        self._stored = stored
        self._open: dict[Path, safe_open] = {}

    def read(self, piece: Piece) -> torch.Tensor:
        assert piece.tensor is not None
        file = self._stored[piece.tensor].file
        if file not in self._open:
            self._open[file] = safe_open(file, framework="pt")
        stored = self._open[file].get_slice(piece.tensor)
        rows = slice(*piece.tensor_rows)
        return stored[rows] if piece.tensor_cols is None else stored[rows, slice(*piece.tensor_cols)]

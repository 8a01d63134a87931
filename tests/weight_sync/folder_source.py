"""The weights of an HF folder as a sharded source: each of several ranks owns some rows of every tensor."""

from __future__ import annotations

import itertools
from pathlib import Path

import torch
from tiny_models import dequantise, stored_tensors, unstacked

from megatron_fleet.platform.communicator import Alone, Communicator
from megatron_fleet.weights.exchange import OwnedBox, ParamMeta, Place, layer_groups
from megatron_fleet.weights.hf_model import open_model


class FolderSource:
    """All weights as one type; what Megatron does not hold is left out.

    Attributes:
        tensors: HF name → float32 values; may be changed between two passes.
    """

    device = torch.device("cpu")

    def __init__(self, folder: Path, model: Communicator | None = None, dtype: torch.dtype = torch.bfloat16) -> None:
        self.place = Place(model=model or Alone())
        self._dtype = dtype
        weights = unstacked(dequantise(stored_tensors(folder)))
        table = open_model(folder, prediction=False).table
        self._float32 = {piece.tensor for matrix in table.matrices() if matrix.rule.float32 for piece in matrix.pieces}
        self.tensors = {name: weights[name].float() for group in layer_groups(table.tensors) for name in group}

    def metadata(self) -> list[ParamMeta]:
        return [
            ParamMeta(n, torch.float32 if n in self._float32 else self._dtype, tuple(t.shape))
            for n, t in self.tensors.items()
        ]

    def groups(self) -> list[list[str]]:
        return layer_groups(self.tensors)

    def owned(self, tensor: str) -> list[OwnedBox]:
        names, ranks = list(self.tensors), self.place.model.size
        number, rows = names.index(tensor), len(self.tensors[tensor])
        cuts = [rows * rank // ranks for rank in range(ranks + 1)]
        found = [OwnedBox(rank, ((a, b), None), number, (a, b)) for rank, (a, b) in enumerate(itertools.pairwise(cuts))]
        return [owned for owned in found if owned.rows[0] < owned.rows[1]]

    def values(self, owned: OwnedBox) -> torch.Tensor:
        return list(self.tensors.values())[owned.local][slice(*owned.rows)]

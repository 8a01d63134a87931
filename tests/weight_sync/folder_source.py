"""The weights of an HF folder as a sharded source: each of several ranks owns some rows of every tensor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from tiny_models import dequantise, stored_tensors, unstacked

from megatron_fleet.weights.hf_model import open_model
from megatron_fleet.weights.source import ParamMeta, Place, layer_groups


class FolderSource:
    """All weights as one type; what Megatron does not hold is left out.

    Attributes:
        tensors: HF name → float32 values; may be changed between two passes.
    """

    def __init__(self, folder: Path, rank: int = 0, ranks: int = 1, dtype: torch.dtype = torch.bfloat16) -> None:
        self.place = Place()
        self._rank, self._ranks, self._dtype = rank, ranks, dtype
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

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for meta in self.metadata():
            yield meta.name, self.tensors[meta.name].to(meta.dtype)

    def write_local(self, out: Mapping[str, torch.Tensor]) -> None:
        for name, whole in out.items():
            rows = slice(len(whole) * self._rank // self._ranks, len(whole) * (self._rank + 1) // self._ranks)
            whole[rows].copy_(self.tensors[name][rows])

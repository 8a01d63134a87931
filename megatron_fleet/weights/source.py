"""The live Megatron model as HF tensors: gathered whole, or this rank's own parts written in place."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from megatron_fleet.weights.communicator import Alone, Communicator
from megatron_fleet.weights.load import global_parameters, local_pieces
from megatron_fleet.weights.mapping import Piece, WeightTable, check_tiling


@dataclass(frozen=True, slots=True)
class ParamMeta:
    """Name, wire dtype and whole shape of one HF tensor (the fields vLLM's weight-transfer protocol reads)."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Shard:
    """Which part of the model this rank holds.

    Attributes:
        tp_rank, tp_size: place in the tensor-parallel group.
        replica: data-parallel (and context-parallel) index; equal tp and pp places of all replicas hold equal weights.
        model: the ranks that together hold one whole model (tensor × pipeline).
    """

    tp_rank: int = 0
    tp_size: int = 1
    replica: int = 0
    model: Communicator = field(default_factory=Alone)


@dataclass(frozen=True, slots=True)
class _Part:
    """A piece with its owner: the rank of the ``model`` communicator whose parameter it is cut from."""

    owner: int
    parameter: str
    piece: Piece

    def shape(self, tensor_shape: tuple[int, ...]) -> tuple[int, ...]:
        rows = self.piece.rows[1] - self.piece.rows[0]
        cols = self.piece.tensor_cols
        return (rows, *((cols[1] - cols[0],) if cols else tensor_shape[1:]))

    def view(self, tensor: torch.Tensor) -> torch.Tensor:
        """The place of this part inside the whole HF tensor."""
        rows = tensor[slice(*self.piece.tensor_rows)]
        return rows if self.piece.tensor_cols is None else rows[:, slice(*self.piece.tensor_cols)]


class MegatronWeightSource:
    """vLLM's structural ``WeightSource`` over Megatron shards, and a gather-free writer.

    The order of tensors is the HF checkpoint's, grouped by layer, equal on every rank and in every pass. Each element
    has exactly one owner: of ranks that hold equal copies (norms under tensor parallelism, a tied head on the last
    pipeline stage) the first one.
    """

    def __init__(
        self, model_chunks: Sequence[nn.Module], hf_config: Mapping[str, Any], *, dtype: torch.dtype, shard: Shard
    ) -> None:
        """Collective over ``shard.model``.

        Args:
            model_chunks: this rank's GPTModel chunks, unwrapped; parameters are read anew in every pass.
            hf_config: raw ``config.json``.
            dtype: of the tensors yielded and written; parameters are cast.

        Raises:
            UserError: model and configuration do not fit.
            ValueError: the ranks together do not hold every tensor exactly once.
        """
        self.shard = shard
        self._dtype = dtype
        self._table = WeightTable(hf_config)
        self._parameters = global_parameters(model_chunks)
        self._device = next((p.device for p in self._parameters.values()), torch.device("cpu"))
        own = {
            name: local_pieces(self._table, name, p, shard.tp_rank, shard.tp_size)
            for name, p in self._parameters.items()
        }
        self._parts = self._assign(shard.model.all_gather(own))

    def metadata(self) -> list[ParamMeta]:
        """The whole model on every rank, in the order of iteration."""
        return [ParamMeta(name, self._dtype, shape) for name, shape in self._table.tensors.items()]

    def groups(self) -> list[list[str]]:
        """Names in order, cut where the transformer layer changes: the unit of gathering."""
        groups: dict[str, list[str]] = {}
        for name in self._table.tensors:
            before, layers, after = name.partition(".layers.")
            groups.setdefault(f"{before}{layers}{after.split('.')[0]}" if layers else name, []).append(name)
        return list(groups.values())

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (HF name, whole tensor) on every rank; a fresh pass each time.

        Collective over ``shard.model``: its ranks iterate in lockstep. One layer exists at a time, on the device of the
        model; one broadcast per layer and owner.
        """
        for names in self.groups():
            yield from zip(names, self._gather(names), strict=True)

    @torch.no_grad()
    def write_local(self, buffer: torch.Tensor, offsets: Mapping[str, int]) -> None:
        """Write the elements that this rank owns into a buffer of whole tensors. No communication.

        Args:
            buffer: uint8 ``[bytes]`` in host memory, shared by the ranks.
            offsets: byte offset of every HF tensor, aligned to its dtype.
        """
        for name, shape in self._table.tensors.items():
            whole: torch.Tensor | None = None
            for part in self._parts[name]:
                if part.owner == self.shard.model.rank:
                    if whole is None:
                        whole = view_in(buffer, offsets[name], self._dtype, shape)
                    part.view(whole).copy_(self._local(part))

    @torch.no_grad()
    def _gather(self, names: list[str]) -> list[torch.Tensor]:
        shapes = self._table.tensors
        whole = [torch.empty(shapes[n], dtype=self._dtype, device=self._device) for n in names]
        by_owner: dict[int, list[tuple[int, _Part]]] = {}
        for k, name in enumerate(names):
            for part in self._parts[name]:
                by_owner.setdefault(part.owner, []).append((k, part))
        for owner, parts in sorted(by_owner.items()):
            sizes = [math.prod(part.shape(whole[k].shape)) for k, part in parts]
            flat = torch.empty(sum(sizes), dtype=self._dtype, device=self._device)
            chunks = flat.split(sizes)
            if owner == self.shard.model.rank:
                for chunk, (_, part) in zip(chunks, parts, strict=True):
                    local = self._local(part)
                    chunk.view(local.shape).copy_(local)
            self.shard.model.broadcast(flat, owner)
            for chunk, (k, part) in zip(chunks, parts, strict=True):
                place = part.view(whole[k])
                place.copy_(chunk.view(place.shape))
        return whole

    def _local(self, part: _Part) -> torch.Tensor:
        return self._parameters[part.parameter][slice(*part.piece.rows)]

    def _assign(self, ranks: list[dict[str, tuple[Piece, ...]]]) -> dict[str, list[_Part]]:
        """Give every element its owner, and check that the ranks hold the model completely."""
        parts: dict[str, dict[Any, _Part]] = {name: {} for name in self._table.tensors}
        for owner, held in enumerate(ranks):
            for parameter, pieces in held.items():
                for piece in pieces:
                    if piece.tensor is not None:
                        box = (piece.tensor_rows, piece.tensor_cols)
                        parts[piece.tensor].setdefault(box, _Part(owner, parameter, piece))
        for name, boxes in parts.items():
            check_tiling(name, self._table.tensors[name], boxes)
        return {name: list(boxes.values()) for name, boxes in parts.items()}


def view_in(buffer: torch.Tensor, offset: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """The tensor of ``dtype`` and ``shape`` that lies at byte ``offset`` of a uint8 buffer; no copy."""
    return buffer[offset : offset + math.prod(shape) * dtype.itemsize].view(dtype).view(*shape)


def megatron_shard() -> Shard:
    """This rank's place, from Megatron's initialised process groups."""
    from megatron.core import parallel_state

    from megatron_fleet.weights.communicator import TorchCommunicator

    return Shard(
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        tp_size=parallel_state.get_tensor_model_parallel_world_size(),
        replica=parallel_state.get_data_parallel_rank(with_context_parallel=True),
        model=TorchCommunicator(parallel_state.get_model_parallel_group()),
    )

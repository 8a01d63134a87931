"""The live Megatron model as HF tensors: gathered whole, or only the parts this rank owns, written in place."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from megatron_fleet.platform.communicator import Alone, Communicator
from megatron_fleet.weights.mapping import Interval, WeightTable, check_tiling
from megatron_fleet.weights.shards import LocalTensor, local_tensors

Box = tuple[Interval, Interval | None]
"""Rows and columns (``None`` = all) of an HF tensor."""


@dataclass(frozen=True, slots=True)
class ParamMeta:
    """Name, dtype as sent and full shape of one HF tensor (the fields that vLLM's weight-transfer protocol reads)."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Place:
    """This rank's position in the parallel layout.

    Attributes:
        replica: data-parallel (and context-parallel) index; ranks with equal tensor- and pipeline-parallel rank hold
            equal dense weights in all replicas.
        model: ranks that together hold one complete model.
    """

    replica: int = 0
    model: Communicator = field(default_factory=Alone)


@dataclass(frozen=True, slots=True)
class _Part:
    """A box of an HF tensor and its owner.

    Attributes:
        owner: rank in the ``model`` communicator.
        local, rows: index of the owner's local tensor, and the rows in it.
    """

    owner: int
    box: Box
    local: int
    rows: Interval

    def shape(self, tensor_shape: tuple[int, ...]) -> tuple[int, ...]:
        rows, cols = self.box
        return (rows[1] - rows[0], *((cols[1] - cols[0],) if cols else tensor_shape[1:]))

    def view(self, tensor: torch.Tensor) -> torch.Tensor:
        """View of this part in the whole HF tensor."""
        rows = tensor[slice(*self.box[0])]
        return rows if self.box[1] is None else rows[:, slice(*self.box[1])]


class MegatronWeightSource:
    """vLLM's structural ``WeightSource`` over Megatron shards, with an additional gather-free writer.

    The order of tensors is the same on every rank and in every pass: tensors before the layers, layer by layer
    (including MTP layers), the rest. Each element has exactly one owner: the first of the ranks that hold equal copies
    (norms under tensor parallelism, a tied head on the last pipeline stage).
    """

    def __init__(
        self, model_chunks: Sequence[nn.Module], hf_config: Mapping[str, Any], *, dtype: torch.dtype, place: Place
    ) -> None:
        """Collective over ``place.model``; Megatron's process groups must exist.

        Args:
            model_chunks: this rank's unwrapped GPTModel chunks; parameters are read again in every pass.
            hf_config: raw ``config.json``.
            dtype: dtype of the tensors yielded and written; parameters are cast. Tensors that the weight table keeps in
                float32 (router biases) stay float32.

        Raises:
            UserError: model and configuration do not match.
            ValueError: the ranks together do not hold every tensor exactly once.
        """
        self.place = place
        with_prediction = any(getattr(chunk, "mtp_process", False) for chunk in model_chunks)
        with_prediction = any(place.model.all_gather(with_prediction))
        self._table = WeightTable(hf_config, prediction=with_prediction)
        self._local = local_tensors(model_chunks, self._table)
        self._device = next((t.view().device for t in self._local), torch.device("cpu"))
        self._parts = self._assign(place.model.all_gather(_held(self._local)))
        float32 = {p.tensor for m in self._table.matrices() if m.rule.float32 for p in m.pieces}
        self._groups = layer_groups(self._table.tensors)
        self._metadata = {
            name: ParamMeta(name, torch.float32 if name in float32 else dtype, self._table.tensors[name])
            for group in self._groups
            for name in group
        }

    def metadata(self) -> list[ParamMeta]:
        """Metadata of the whole model on every rank, in iteration order."""
        return list(self._metadata.values())

    def groups(self) -> list[list[str]]:
        """Names in order, split where the transformer layer changes: the unit of gathering."""
        return self._groups

    def iter_groups(self) -> Iterator[tuple[list[str], list[torch.Tensor]]]:
        """Names and whole tensors, one group at a time; see `__iter__`."""
        for group in self._groups:
            yield group, self._gather([self._metadata[name] for name in group])

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (HF name, whole tensor) on every rank; a fresh pass each time.

        Collective over ``place.model``: its ranks iterate in lockstep. Only one layer is materialised at a time, on the
        model's device; one broadcast per layer, dtype and owner.
        """
        for names, tensors in self.iter_groups():
            yield from zip(names, tensors, strict=True)

    @torch.no_grad()
    def write_local(self, out: Mapping[str, torch.Tensor]) -> None:
        """Write the elements that this rank owns into whole tensors, cast to their dtype. No communication.

        Args:
            out: HF name → a tensor of its full shape, in memory that the ranks share; names may be omitted.
        """
        for name, whole in out.items():
            for part in self._parts[name]:
                if part.owner == self.place.model.rank:
                    part.view(whole).copy_(self._values(part))

    @torch.no_grad()
    def _gather(self, group: list[ParamMeta]) -> list[torch.Tensor]:
        whole = [torch.empty(meta.shape, dtype=meta.dtype, device=self._device) for meta in group]
        by_owner: dict[tuple[int, str], list[tuple[int, _Part]]] = {}
        for k, meta in enumerate(group):
            for part in self._parts[meta.name]:
                by_owner.setdefault((part.owner, str(meta.dtype)), []).append((k, part))
        for (owner, _), parts in sorted(by_owner.items(), key=lambda item: item[0]):
            sizes = [math.prod(part.shape(whole[k].shape)) for k, part in parts]
            flat = torch.empty(sum(sizes), dtype=whole[parts[0][0]].dtype, device=self._device)
            chunks = flat.split(sizes)
            if owner == self.place.model.rank:
                for chunk, (_, part) in zip(chunks, parts, strict=True):
                    local = self._values(part)
                    chunk.view(local.shape).copy_(local)
            self.place.model.broadcast(flat, owner)
            for chunk, (k, part) in zip(chunks, parts, strict=True):
                place = part.view(whole[k])
                place.copy_(chunk.view(place.shape))
        return whole

    def _values(self, part: _Part) -> torch.Tensor:
        local = self._local[part.local]
        values, offset = local.view()[slice(*part.rows)], local.matrix.rule.offset
        return values.float() - offset if offset else values

    def _assign(self, ranks: list[list[tuple[str, Box, int, Interval]]]) -> dict[str, list[_Part]]:
        """Assign every element to an owner, and check that the ranks hold the complete model."""
        parts: dict[str, dict[Box, _Part]] = {name: {} for name in self._table.tensors}
        for owner, held in enumerate(ranks):
            for tensor, box, local, rows in held:
                parts[tensor].setdefault(box, _Part(owner, box, local, rows))
        for name, boxes in parts.items():
            check_tiling(name, self._table.tensors[name], boxes)
        return {name: list(boxes.values()) for name, boxes in parts.items()}


def _held(local: list[LocalTensor]) -> list[tuple[str, Box, int, Interval]]:
    """All parts that this rank holds: HF tensor, box in it, index of the local tensor, rows in that tensor."""
    return [
        (piece.tensor, (piece.tensor_rows, target.cols), k, piece.rows)
        for k, target in enumerate(local)
        for piece in target.matrix.restrict(target.rows)
        if piece.tensor is not None
    ]


def layer_groups(names: Iterable[str]) -> list[list[str]]:
    """Group HF names by transformer layer: names before the first layer, each layer, the rest.

    Matches ``layerwise_groups`` of vLLM 0.32 (``distributed/weight_transfer/base.py``), by which its engines number the
    groups.
    """
    before: list[str] = []
    after: list[str] = []
    layers: dict[tuple[str, int], list[str]] = {}
    for name in names:
        match = re.match(r"(.*?)\.(\d+)\.", name)
        if match is not None:
            layers.setdefault((match[1], int(match[2])), []).append(name)
        else:
            (after if layers else before).append(name)
    stacks = list(dict.fromkeys(stack for stack, _ in layers))
    ordered = sorted(layers, key=lambda key: (stacks.index(key[0]), key[1]))
    return [group for group in (before, *(layers[key] for key in ordered), after) if group]


def megatron_place() -> Place:
    """This rank's place, from Megatron's initialised process groups."""
    from megatron.core import parallel_state

    from megatron_fleet.platform.communicator import TorchCommunicator

    tensor = parallel_state.get_tensor_model_parallel_world_size()
    split = parallel_state.get_expert_tensor_parallel_world_size() != tensor
    if parallel_state.get_expert_model_parallel_world_size() > 1 or split:
        # Experts are spread over data-parallel ranks, so no smaller group is guaranteed to hold a whole model.
        return Place(model=TorchCommunicator())
    return Place(
        replica=parallel_state.get_data_parallel_rank(with_context_parallel=True),
        model=TorchCommunicator(parallel_state.get_model_parallel_group()),
    )

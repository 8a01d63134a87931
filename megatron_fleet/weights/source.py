"""The live Megatron model as a `WeightSource`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from megatron_fleet.weights.exchange import AsHeld, Box, FormattedSource, OwnedBox, ParamMeta, Place, layer_groups
from megatron_fleet.weights.mapping import Interval, WeightTable, check_tiling
from megatron_fleet.weights.shards import LocalTensor, local_tensors


class MegatronWeightSource:
    """`WeightSource` over Megatron shards, and a structural ``WeightSource`` of vLLM.

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
            dtype: dtype of the tensors gathered; parameters are cast. Tensors that the weight table keeps in float32
                (router biases) stay float32.

        Raises:
            UserError: model and configuration do not match.
            ValueError: the ranks together do not hold every tensor exactly once.
        """
        self.place = place
        with_prediction = any(getattr(chunk, "mtp_process", False) for chunk in model_chunks)
        with_prediction = any(place.model.all_gather(with_prediction))
        self._table = WeightTable(hf_config, prediction=with_prediction)
        self._local = local_tensors(model_chunks, self._table)
        self.device = next((t.view().device for t in self._local), torch.device("cpu"))
        self._owned = self._assign(place.model.all_gather(_held(self._local)))
        float32 = {p.tensor for m in self._table.matrices() if m.rule.float32 for p in m.pieces}
        self._groups = layer_groups(self._table.tensors)
        self._metadata = {
            name: ParamMeta(name, torch.float32 if name in float32 else dtype, self._table.tensors[name])
            for group in self._groups
            for name in group
        }

    def metadata(self) -> list[ParamMeta]:
        return list(self._metadata.values())

    def groups(self) -> list[list[str]]:
        return self._groups

    def owned(self, tensor: str) -> Sequence[OwnedBox]:
        return self._owned[tensor]

    def values(self, owned: OwnedBox) -> torch.Tensor:
        local = self._local[owned.local]
        values, offset = local.view()[slice(*owned.rows)], local.matrix.rule.offset
        return values.float() - offset if offset else values

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (HF name, whole tensor) on every rank, see `FormattedSource.__iter__`."""
        return iter(FormattedSource(self, AsHeld()))

    def _assign(self, ranks: list[list[tuple[str, Box, int, Interval]]]) -> dict[str, list[OwnedBox]]:
        """Assign every element to an owner, and check that the ranks hold the complete model."""
        owned: dict[str, dict[Box, OwnedBox]] = {name: {} for name in self._table.tensors}
        for owner, held in enumerate(ranks):
            for tensor, box, local, rows in held:
                owned[tensor].setdefault(box, OwnedBox(owner, box, local, rows))
        for name, boxes in owned.items():
            check_tiling(name, self._table.tensors[name], boxes)
        return {name: list(boxes.values()) for name, boxes in owned.items()}


def _held(local: list[LocalTensor]) -> list[tuple[str, Box, int, Interval]]:
    """All parts that this rank holds: HF tensor, box in it, index of the local tensor, rows in that tensor."""
    return [
        (piece.tensor, (piece.tensor_rows, target.cols), k, piece.rows)
        for k, target in enumerate(local)
        for piece in target.matrix.restrict(target.rows)
        if piece.tensor is not None
    ]


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

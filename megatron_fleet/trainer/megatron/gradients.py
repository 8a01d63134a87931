"""Gradient metrics of a policy in any layout, from a few sampled matrices of its layers.

Autograd hooks on the sampled parameters see the gradient of each micro-batch before it is accumulated. A rank keeps the
parts of the samples that it holds. Summed over the ranks that share a micro-batch (tensor, context, pipeline) they are
the gradients of whole micro-batches; only then may they be squared, and accumulated over micro-batches and
data-parallel ranks. Routed experts see the micro-batches of several data-parallel ranks at once: their gradients are
summed over all ranks first, so that their unit is a micro-step of the whole batch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
from megatron.core.transformer.module import MegatronModule
from torch import nn

from megatron_fleet.config.sections.trainer import GradientMetricsConfig
from megatron_fleet.platform.communicator import TorchCommunicator
from megatron_fleet.trainer.gradient_metrics import (
    SIDE,
    SampledMatrix,
    Sums,
    choose,
    gradient_metrics,
    megabytes_edited,
)
from megatron_fleet.trainer.megatron.build import parameter_shards

_LAYER = re.compile(r"(?<=decoder\.layers)\.(\d+)(?=\.)")


@dataclass(frozen=True, slots=True)
class _Shard:
    """Trained matrix, or the rectangle of it that this rank holds as rows ``first`` … of ``parameter``.

    Attributes:
        rows, cols: first and one past the last row and column in the whole matrix.
        is_main: this copy of the weights is the one that counts.
    """

    matrix: SampledMatrix
    parameter: nn.Parameter
    first: int
    rows: tuple[int, int]
    cols: tuple[int, int]
    is_main: bool


@dataclass(frozen=True, slots=True)
class _Piece:
    """This rank's piece of a sample: ``parameter[rows[:, None], cols]`` is ``sample[into_rows[:, None], into_cols]`` of
    sample number ``sample``.
    """

    sample: int
    parameter: nn.Parameter
    rows: torch.Tensor
    cols: torch.Tensor
    into_rows: torch.Tensor
    into_cols: torch.Tensor
    is_main: bool
    has_gradient: bool

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor[self.rows[:, None], self.cols]

    def put(self, samples: torch.Tensor, values: torch.Tensor) -> None:
        """Write ``values`` of the piece into ``samples``, ``[samples, SIDE, SIDE]``."""
        samples[self.sample, self.into_rows[:, None], self.into_cols] = values.to(samples.dtype)


class GradientProbe:
    """Probe that measures every ``settings.every``-th update, starting with the first. Every method is collective."""

    def __init__(self, chunks: Sequence[MegatronModule], settings: GradientMetricsConfig) -> None:
        """Choose the samples. ``chunks``: this rank's, unwrapped, with adapters if there are any."""
        shards = list(_shards(chunks))
        everywhere = TorchCommunicator().all_gather([shard.matrix for shard in shards])
        matrices: set[SampledMatrix] = {matrix for part in everywhere for matrix in part}
        self._all_sizes = sum(matrix.size for matrix in matrices)
        self._samples = choose(list(matrices), settings.parameters)
        numbers = {matrix: number for number, matrix in enumerate(self._samples)}
        self._pieces = [_piece(shard, numbers[shard.matrix]) for shard in shards if shard.matrix in numbers]
        self._device = next(chunks[0].parameters()).device
        self._experts = [number for number, matrix in enumerate(self._samples) if matrix.is_expert]
        self._every = settings.every
        self._updates = 0
        self._tables: list[torch.Tensor] = []
        self._real: list[bool] = []

    @property
    def due(self) -> bool:
        """Whether the next update is measured."""
        return self._updates % self._every == 0

    @property
    def observed(self) -> list[nn.Parameter]:
        """Parameters whose gradients the next pass records."""
        return [piece.parameter for piece in self._pieces if piece.has_gradient] if self.due else []

    @contextmanager
    def watching(self, real: Sequence[bool]) -> Iterator[None]:
        """Record the gradients of one pass. ``real``: for each of its micro-batches, whether it holds any sequence."""
        if not self.due:
            yield
            return
        # [micro-batches, samples, SIDE, SIDE]
        table = torch.zeros(len(real), len(self._samples), SIDE, SIDE, device=self._device)
        handles = [p.parameter.register_hook(_Keep(p, table)) for p in self._pieces if p.has_gradient]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        self._tables.append(table)
        self._real.extend(real)

    def weights(self) -> list[torch.Tensor]:
        """Copies of the sampled weights on this rank in bfloat16; empty when the update is not measured."""
        return self._weights() if self.due else []

    def _weights(self) -> list[torch.Tensor]:
        return [piece.of(piece.parameter.detach()).to(torch.bfloat16) for piece in self._pieces]

    def finish(self, before: Sequence[torch.Tensor], skipped: bool) -> dict[str, float]:
        """Metrics of an update that was taken; empty when it was skipped or is not measured.

        Args:
            before: `weights` before the update.
        """
        due, tables, real = self.due, self._tables, self._real
        self._updates += 1
        self._tables, self._real = [], []
        if not due or skipped or not tables:
            return {}
        table = torch.cat(tables)
        return gradient_metrics(self._reduce(table, real)) | self._edited(before)

    def _reduce(self, table: torch.Tensor, real: Sequence[bool]) -> list[Sums]:
        data_group = TorchCommunicator(parallel_state.get_data_parallel_group())
        for group in (parallel_state.get_context_parallel_group(), parallel_state.get_model_parallel_group()):
            TorchCommunicator(group).sum_(table)
        any_real = torch.tensor(real, dtype=torch.int32, device=self._device)
        counts = any_real.sum().repeat(len(self._samples)).double()
        if self._experts:
            experts = table[:, self._experts]
            data_group.sum_(experts)
            data_group.max_(any_real)
            mine = float(data_group.rank == 0)  # all ranks have them now; count them once from here on
            table[:, self._experts] = experts * mine
            counts[self._experts] = any_real.sum().double() * mine
        energies = torch.linalg.vector_norm(table, dim=(0, 2, 3), dtype=torch.float64).square()
        totals = table.sum(0, dtype=torch.float64)
        for tensor in (counts, energies, totals):
            data_group.sum_(tensor)
        sizes = [[min(SIDE, n) for n in matrix.shape] for matrix in self._samples]
        cut = [total[:rows, :cols] for total, (rows, cols) in zip(totals.cpu(), sizes, strict=True)]
        return [Sums(t, e, int(n)) for t, e, n in zip(cut, energies.tolist(), counts.tolist(), strict=True)]

    def _edited(self, before: Sequence[torch.Tensor]) -> dict[str, float]:
        changed = torch.zeros(len(self._samples), SIDE, SIDE, device=self._device)
        for piece, old, new in zip(self._pieces, before, self._weights(), strict=True):
            if piece.is_main:
                piece.put(changed, old != new)
        TorchCommunicator().sum_(changed)
        counts = changed.sum((1, 2)).tolist()
        sampled = [min(SIDE, matrix.shape[0]) * min(SIDE, matrix.shape[1]) for matrix in self._samples]
        shares = {m: n / size for m, n, size in zip(self._samples, counts, sampled, strict=True)}
        return megabytes_edited(shares, self._all_sizes)


class _Keep:
    """Hook that writes a piece's part of the j-th gradient to row j of a table."""

    def __init__(self, piece: _Piece, table: torch.Tensor) -> None:
        self._piece, self._table, self._calls = piece, table, 0

    def __call__(self, gradient: torch.Tensor) -> None:
        self._piece.put(self._table[self._calls], self._piece.of(gradient))
        self._calls += 1


def _shards(chunks: Sequence[MegatronModule]) -> Iterator[_Shard]:
    """Trained matrices of layers, as far as this rank holds them."""
    for chunk in chunks:
        trained = [p for p in chunk.parameters() if p.requires_grad and p.ndim == 2]
        for shard in _described(chunk):
            if "decoder.layers" not in shard.key or shard.data.ndim != 2:
                continue
            found = [p for p in trained if _holds(p, shard.data)]
            if found:
                yield _shard(shard, found[0])


def _described(chunk: MegatronModule) -> Iterator[ShardedTensor]:
    adapters: Any = getattr(chunk, "adapters", None)
    if adapters is None:
        yield from parameter_shards([chunk])
        return
    state = adapters.describe("", parallel_state.get_data_parallel_group(with_context_parallel=True))
    apply_factories(state)
    yield from (value for value in nested_values(state) if isinstance(value, ShardedTensor))


def _holds(parameter: nn.Parameter, data: torch.Tensor) -> bool:
    """Whether ``data`` lies in the parameter's memory."""
    start = parameter.data_ptr()
    return start <= data.data_ptr() < start + parameter.numel() * parameter.element_size()


def _shard(shard: ShardedTensor, parameter: nn.Parameter) -> _Shard:
    lead = shard.prepend_axis_num
    layer = _LAYER.search(shard.key)
    place = (*([int(layer[1])] if layer else []), *shard.global_offset[:lead])
    (rows, cols), (row, col) = shard.global_shape[lead:], shard.global_offset[lead:]
    offset = (shard.data.data_ptr() - parameter.data_ptr()) // parameter.element_size()
    height, width = shard.data.shape
    replica = shard.replica_id
    return _Shard(
        matrix=SampledMatrix(_LAYER.sub("", shard.key), place, (rows, cols)),
        parameter=parameter,
        first=offset // parameter.shape[1],
        rows=(row, row + height),
        cols=(col, col + width),
        is_main=not any(replica) if isinstance(replica, tuple) else replica == 0,
    )


def _piece(shard: _Shard, sample: int) -> _Piece:
    rows, cols = shard.matrix.lines()
    chosen_rows = [(i, r) for i, r in enumerate(rows) if shard.rows[0] <= r < shard.rows[1]]
    chosen_cols = [(i, c) for i, c in enumerate(cols) if shard.cols[0] <= c < shard.cols[1]]

    def index(values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=shard.parameter.device)

    return _Piece(
        sample=sample,
        parameter=shard.parameter,
        rows=index([r - shard.rows[0] + shard.first for _, r in chosen_rows]),
        cols=index([c - shard.cols[0] for _, c in chosen_cols]),
        into_rows=index([i for i, _ in chosen_rows]),
        into_cols=index([i for i, _ in chosen_cols]),
        is_main=shard.is_main,
        has_gradient=_has_own_gradient(shard),
    )


def _has_own_gradient(shard: _Shard) -> bool:
    """Whether this rank's gradient is added to those of its reduction group, instead of repeating one of them.

    As Megatron reduces them: copies on tensor-parallel ranks each have part of the gradient when these ranks split the
    tokens, and the whole gradient when they do not.
    """
    parameter: Any = shard.parameter
    if shard.matrix.is_expert:
        return not getattr(parameter, "shared", False)
    if getattr(parameter, "tensor_model_parallel", False) or getattr(parameter, "sequence_parallel", False):
        return True
    return parallel_state.get_tensor_model_parallel_rank() == 0

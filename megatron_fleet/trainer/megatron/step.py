"""Execution of micro-batches in Megatron's pipeline schedule, with or without gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron_fleet.algorithms.losses import LossFn, LossInputs
from megatron_fleet.platform.device import device
from megatron_fleet.platform.megatron.attention import RowParams
from megatron_fleet.platform.zigzag import local_tokens
from megatron_fleet.trainer.megatron.model import LogprobQuery
from megatron_fleet.trainer.megatron.routing import row_experts
from megatron_fleet.trainer.packing.pack import PackedRow

Outputs = tuple[torch.Tensor, torch.Tensor]
"""Log-probs and entropies ``[A]`` of a micro-batch's trained positions."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of every pass: the sampling temperature and the positions per log-prob chunk."""

    temperature: float
    chunk: int


def row_params(row: PackedRow, where: torch.device) -> RowParams:
    """Megatron's description of the micro-batch; the filler is a sequence of its own that no other
    sequence attends to.
    """
    pieces = [*row.lengths, row.filler] if row.filler else list(row.lengths)
    ends = torch.tensor([0, *pieces]).cumsum(0).to(where, torch.int32)
    return RowParams(
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        max_seqlen_q=max(pieces),
        max_seqlen_kv=max(pieces),
        lengths=row.lengths,
        filler=row.filler,
    )


def run_logprobs(
    chunks: Sequence[DistributedDataParallel], rows: Sequence[PackedRow], settings: Settings
) -> list[torch.Tensor]:
    """Log-probs float32 ``[A]`` of each micro-batch, without gradients; empty on all but the last pipeline stage."""

    def collect(_: PackedRow, outputs: Outputs) -> tuple[torch.Tensor, torch.Tensor]:
        return outputs[0].sum(), outputs[0]

    with torch.no_grad():
        return _run(chunks, rows, settings, collect, forward_only=True)


def run_loss(
    chunks: Sequence[DistributedDataParallel], rows: Sequence[PackedRow], settings: Settings, loss: LossFn
) -> list[dict[str, torch.Tensor]]:
    """Accumulate gradients; returns the ``loss`` and metric sums of each micro-batch, on the last
    pipeline stage only.
    """

    def evaluate(row: PackedRow, outputs: Outputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        total, sums = loss(loss_inputs(row, outputs))
        return total, {"loss": total.detach(), **sums}

    return _run(chunks, rows, settings, evaluate, forward_only=False)


def loss_inputs(row: PackedRow, outputs: Outputs) -> LossInputs:
    """Loss inputs of a micro-batch from its fields and ``outputs``, on the device of the latter."""
    where = outputs[0].device
    optional = {
        name: None if field is None else field.to(where)
        for name, field in (("proximal", row.proximal), ("reference", row.reference), ("staleness", row.staleness))
    }
    return LossInputs(
        logprobs=outputs[0],
        entropy=outputs[1],
        loss_scale=row.loss_scale.to(where),
        scaled_advantages=row.scaled_advantages.to(where),
        behaviour=row.behaviour.to(where),
        sequence=row.sequence.to(where),
        sequences=int(row.sequence[-1]) + 1 if len(row.sequence) else 0,
        **optional,
    )


def _run(
    chunks: Sequence[DistributedDataParallel],
    rows: Sequence[PackedRow],
    settings: Settings,
    finish: Callable[[PackedRow, Outputs], tuple[torch.Tensor, Any]],
    forward_only: bool,
) -> list[Any]:
    where = device()
    # With several stages all micro-batches have one width, see `MegatronPolicy`; else only its presence matters.
    width = len(rows[0].tokens)

    def forward_step(data: Iterator[PackedRow], model: Any) -> tuple[Any, Callable[..., Any]]:
        row = next(data)
        return model(**model_inputs(row, model, settings, where)), partial(_three, finish, row)

    several = len(chunks) > 1
    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(rows) for _ in chunks] if several else iter(rows),
        model=list(chunks) if several else chunks[0],
        num_microbatches=len(rows),
        seq_length=width,
        micro_batch_size=1,
        forward_only=forward_only,
    )


def model_inputs(row: PackedRow, model: Any, settings: Settings, where: torch.device) -> dict[str, Any]:
    """Arguments of `PolicyModel.forward` for this context-parallel rank's tokens of a micro-batch."""
    params = row_params(row, where)
    ranks = parallel_state.get_context_parallel_world_size()
    places, positions = torch.arange(len(row.trained)), row.trained
    tokens, row_positions, real = row.tokens, row.positions, row.real
    mine = None
    if ranks > 1:
        pieces = [*row.lengths, *([row.filler] if row.filler else [])]
        mine = torch.from_numpy(local_tokens(pieces, ranks, parallel_state.get_context_parallel_rank()))
        here = torch.full_like(row.tokens, -1)
        here[mine] = torch.arange(len(mine))
        places = torch.nonzero(here[row.trained] >= 0)[:, 0]
        positions = here[row.trained[places]]
        tokens, row_positions, real = tokens[mine], row_positions[mine], real[mine]
    params.routing = row_experts(row, model, mine, where)
    return {
        "input_ids": tokens[None].to(where),
        "position_ids": row_positions[None].to(where),
        "query": LogprobQuery(
            positions=positions.to(where),
            targets=row.targets[places].to(where),
            places=places.to(where),
            count=len(row.trained),
            temperature=settings.temperature,
            chunk=settings.chunk,
        ),
        "packed_seq_params": params,
        "padding": ~real[None].to(where),
    }


def _three(finish: Callable[..., Any], row: PackedRow, outputs: Outputs) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """Loss in the schedule's form: it sums the token counts, but nothing is divided by them."""
    total, kept = finish(row, outputs)
    return total, torch.tensor(0, dtype=torch.int32, device=total.device), kept


def reduce_sums(per_row: Sequence[dict[str, torch.Tensor]], counts: dict[str, int]) -> dict[str, float]:
    """Sum over micro-batches and data-parallel ranks, then broadcast to every pipeline stage.

    Args:
        per_row: metric sums of each micro-batch; empty on all but the last pipeline stage.
        counts: integers known on every rank, also summed over data-parallel ranks.
    """
    box: list[dict[str, float] | None] = [None]
    if parallel_state.is_pipeline_last_stage():
        names = sorted(per_row[0])
        table = torch.stack([torch.stack([row[name].double() for name in names]) for row in per_row]).sum(0)
        table = torch.cat([table, table.new_tensor(list(counts.values()))])
        dist.all_reduce(table, group=parallel_state.get_data_parallel_group())
        box = [dict(zip([*names, *counts], table.tolist(), strict=True))]
    return share_from_last_stage(box)


def share_from_last_stage(box: list[Any]) -> Any:
    """Broadcast ``box[0]`` of the last pipeline stage to every stage."""
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        dist.broadcast_object_list(
            box,
            src=parallel_state.get_pipeline_model_parallel_last_rank(),
            group=parallel_state.get_pipeline_model_parallel_group(),
        )
    return box[0]

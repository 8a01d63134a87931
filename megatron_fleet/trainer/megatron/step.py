"""Execution of micro-batches in Megatron's pipeline schedule, with or without gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron_fleet.algorithms.losses import LossFn, LossInputs
from megatron_fleet.platform.communicator import TorchCommunicator
from megatron_fleet.platform.device import device, to_device
from megatron_fleet.platform.megatron.attention import MicroBatchParams, local_tokens
from megatron_fleet.trainer.megatron.model import LogprobQuery
from megatron_fleet.trainer.megatron.routing import micro_batch_experts
from megatron_fleet.trainer.packing.pack import PackedMicroBatch

Outputs = tuple[torch.Tensor, torch.Tensor]
"""Log-probs and entropies ``[A]`` of a micro-batch's trained positions."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of every pass: the sampling temperature and the positions per log-prob chunk."""

    temperature: float
    chunk: int


def micro_batch_params(micro_batch: PackedMicroBatch, where: torch.device) -> MicroBatchParams:
    """Megatron's description of the micro-batch; the filler is a sequence of its own that no other
    sequence attends to.
    """
    pieces = [*micro_batch.lengths, micro_batch.filler] if micro_batch.filler else list(micro_batch.lengths)
    ends = to_device(torch.tensor([0, *pieces]).cumsum(0).int(), where)
    return MicroBatchParams(
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        max_seqlen_q=max(pieces),
        max_seqlen_kv=max(pieces),
        lengths=micro_batch.lengths,
        filler=micro_batch.filler,
    )


def run_logprobs(
    chunks: Sequence[DistributedDataParallel], micro_batches: Sequence[PackedMicroBatch], settings: Settings
) -> list[torch.Tensor]:
    """Log-probs float32 ``[A]`` of each micro-batch, without gradients; empty on all but the last pipeline stage."""

    def collect(_: PackedMicroBatch, outputs: Outputs) -> tuple[torch.Tensor, torch.Tensor]:
        return outputs[0].sum(), outputs[0]

    with torch.no_grad():
        return _run(chunks, micro_batches, settings, collect, forward_only=True)


def run_loss(
    chunks: Sequence[DistributedDataParallel],
    micro_batches: Sequence[PackedMicroBatch],
    settings: Settings,
    loss: LossFn,
) -> list[dict[str, torch.Tensor]]:
    """Accumulate gradients; returns the ``loss`` and metric sums of each micro-batch, on the last
    pipeline stage only.
    """

    def evaluate(micro_batch: PackedMicroBatch, outputs: Outputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        total, sums = loss(loss_inputs(micro_batch, outputs))
        return total, {"loss": total.detach(), **sums}

    return _run(chunks, micro_batches, settings, evaluate, forward_only=False)


def loss_inputs(micro_batch: PackedMicroBatch, outputs: Outputs) -> LossInputs:
    """Loss inputs of a micro-batch from its fields and ``outputs``, on the device of the latter."""
    where = outputs[0].device
    return LossInputs(
        logprobs=outputs[0],
        entropy=outputs[1],
        loss_scale=to_device(micro_batch.loss_scale, where),
        scaled_advantages=to_device(micro_batch.scaled_advantages, where),
        behaviour=to_device(micro_batch.behaviour, where),
        sequence=to_device(micro_batch.sequence, where),
        sequences=int(micro_batch.sequence[-1]) + 1 if len(micro_batch.sequence) else 0,
        arrays={name: to_device(values, where) for name, values in micro_batch.arrays.items()},
    )


def _run(
    chunks: Sequence[DistributedDataParallel],
    micro_batches: Sequence[PackedMicroBatch],
    settings: Settings,
    finish: Callable[[PackedMicroBatch, Outputs], tuple[torch.Tensor, Any]],
    forward_only: bool,
) -> list[Any]:
    where = device()
    # With several stages all micro-batches have one width, see `MegatronPolicy`; else only its presence matters.
    width = len(micro_batches[0].tokens)

    def forward_step(data: Iterator[PackedMicroBatch], model: Any) -> tuple[Any, Callable[..., Any]]:
        micro_batch = next(data)
        return model(**model_inputs(micro_batch, model, settings, where)), partial(_three, finish, micro_batch)

    several = len(chunks) > 1
    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(micro_batches) for _ in chunks] if several else iter(micro_batches),
        model=list(chunks) if several else chunks[0],
        num_microbatches=len(micro_batches),
        seq_length=width,
        micro_batch_size=1,
        forward_only=forward_only,
    )


def model_inputs(micro_batch: PackedMicroBatch, model: Any, settings: Settings, where: torch.device) -> dict[str, Any]:
    """Arguments of `PolicyModel.forward` for this context-parallel rank's tokens of a micro-batch."""
    params = micro_batch_params(micro_batch, where)
    ranks = parallel_state.get_context_parallel_world_size()
    places, positions = torch.arange(len(micro_batch.trained)), micro_batch.trained
    tokens, position_ids, real = micro_batch.tokens, micro_batch.positions, micro_batch.real
    mine = None
    if ranks > 1:
        pieces = [*micro_batch.lengths, *([micro_batch.filler] if micro_batch.filler else [])]
        mine = torch.from_numpy(local_tokens(pieces, ranks, parallel_state.get_context_parallel_rank()))
        here = torch.full_like(micro_batch.tokens, -1)
        here[mine] = torch.arange(len(mine))
        places = torch.nonzero(here[micro_batch.trained] >= 0)[:, 0]
        positions = here[micro_batch.trained[places]]
        tokens, position_ids, real = tokens[mine], position_ids[mine], real[mine]
    params.routing = micro_batch_experts(micro_batch, model, mine, where)
    return {
        "input_ids": to_device(tokens[None], where),
        "position_ids": to_device(position_ids[None], where),
        "query": LogprobQuery(
            positions=to_device(positions, where),
            targets=to_device(micro_batch.targets[places], where),
            places=to_device(places, where),
            count=len(micro_batch.trained),
            temperature=settings.temperature,
            chunk=settings.chunk,
        ),
        "packed_seq_params": params,
        "padding": to_device(~real[None], where),
    }


def _three(
    finish: Callable[..., Any], micro_batch: PackedMicroBatch, outputs: Outputs
) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """Loss in the schedule's form: it sums the token counts, but nothing is divided by them."""
    total, kept = finish(micro_batch, outputs)
    return total, torch.zeros((), dtype=torch.int32, device=total.device), kept


def reduce_sums(per_micro_batch: Sequence[dict[str, torch.Tensor]], counts: dict[str, int]) -> dict[str, float]:
    """Sum over micro-batches and data-parallel ranks, then broadcast to every pipeline stage.

    Args:
        per_micro_batch: metric sums of each micro-batch; empty on all but the last pipeline stage.
        counts: integers known on every rank, also summed over data-parallel ranks.
    """
    sums: dict[str, float] = {}
    if parallel_state.is_pipeline_last_stage():
        names = sorted(per_micro_batch[0])
        table = torch.stack([torch.stack([each[name].double() for name in names]) for each in per_micro_batch]).sum(0)
        table = torch.cat([table, to_device(torch.tensor(list(counts.values()), dtype=table.dtype), table.device)])
        TorchCommunicator(parallel_state.get_data_parallel_group()).sum_(table)
        sums = dict(zip([*names, *counts], table.tolist(), strict=True))
    return share_from_last_stage(sums)


def share_from_last_stage(value: Any) -> Any:
    """Return the ``value`` of the last pipeline stage, on every stage."""
    stages = TorchCommunicator(parallel_state.get_pipeline_model_parallel_group())
    return stages.broadcast_value(value, stages.size - 1)

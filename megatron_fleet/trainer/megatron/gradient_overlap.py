"""Reduction of gradients over data-parallel ranks while the last micro-batch's backward pass still runs.

Megatron cuts the gradient buffers into buckets and reduces each as soon as the last micro-batch has added to all of its
parameters. It expects that every micro-batch reaches every parameter, and that the next pass comes after the optimizer
step. Here neither holds, and one gradient escapes it:

* a rank with less data ends with an empty micro-batch, which may not reach all parameters. Buckets are therefore
  reduced in one order on all ranks, and what is left when the pass ends is reduced then;
* another pass may add to reduced gradients. The reduced part then stays on the rank that owns it and the rest becomes
  zero, so that the sum over ranks is as before;
* the gradient of the output weight goes straight into its buffer (`PolicyModel`), unseen by autograd.

Attributes of Megatron's bucket groups are those of 0.16.1 to 0.19.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed.param_and_grad_buffer import shard_buffer

from megatron_fleet.config.schema import PolicyConfig


def overlap_arguments(policy: PolicyConfig, cuda: bool) -> dict[str, Any]:
    """Arguments of Megatron's ``DistributedDataParallelConfig``. Process groups must exist.

    Without other ranks there is nothing to reduce, and on a CPU communication takes the cores of the computation. After
    the last update of a batch all parameters are sent to the engines, so gathering them overlaps with nothing.

    Args:
        cuda: ranks have CUDA devices.
    """
    wanted = cuda if policy.overlap is None else policy.overlap
    several = parallel_state.get_data_parallel_world_size(with_context_parallel=True) > 1
    if not (wanted and several):
        return {}
    return {"overlap_grad_reduce": True, "overlap_param_gather": policy.updates_per_batch > 1}


class GradientOverlap:
    """Overlap of all chunks of a rank. Without ``overlap_grad_reduce`` every method does nothing."""

    def __init__(self, chunks: Sequence[DistributedDataParallel]) -> None:
        """Connect the chunks. Their gradients must be zero."""
        self._groups = _in_backward_order(chunks) if chunks[0].ddp_config.overlap_grad_reduce else []
        self._ready: set[int] = set()
        self._next = 0
        if not self._groups:
            return
        functions = [chunk.no_sync for chunk in chunks]
        chunks[0].config.no_sync_func = functions if len(functions) > 1 else functions[0]
        self._starts = [group.start_grad_sync for group in self._groups]
        for number, group in enumerate(self._groups):
            group.start_grad_sync = partial(self._is_ready, number)
            # Megatron would learn in the first pass how often each parameter gets a gradient.
            group.is_first_batch = False
            group.golden_per_param_grad_ready_counts = dict.fromkeys(group.params, 1)
        for chunk in chunks:
            weight = chunk.module.unseen_weight
            # Without this entry Megatron's own hook, which insists on a gradient, leaves the parameter alone.
            if weight is not None and (group := chunk.param_to_bucket_group.pop(weight, None)) is not None:
                chunk.module.on_output_gradient = partial(group.register_grad_ready, weight)

    def begin(self, again: bool) -> None:
        """Prepare for a pass. ``again``: the buffers hold gradients of an earlier one."""
        self._ready.clear()
        self._next = 0
        for group in self._groups if again else ():
            group.finish_grad_sync()
            size = group.intra_distributed_optimizer_instance_size
            for bucket in group.buckets:
                for owner, part in enumerate(shard_buffer(bucket.grad_data, size)):
                    if owner != group.intra_distributed_optimizer_instance_rank:
                        part.zero_()
            group.reset()

    def end(self) -> None:
        """Start what has not been started; later work on the device waits for all of it.

        Raises:
            RuntimeError: a parameter got several gradients from one micro-batch, which may have been too late.
        """
        for group, start in zip(self._groups, self._starts if self._groups else (), strict=True):
            if max(group.per_param_grad_ready_counts.values(), default=1) > 1:
                raise RuntimeError("a parameter is used in several places; set policy.overlap=false")
            if group.grad_reduce_handle is None:
                start()
        for group in self._groups:
            group.grad_reduce_handle.wait()

    def abandon(self) -> None:
        """Wait for reductions whose result nobody wants."""
        for group in self._groups:
            if group.grad_reduce_handle is not None:
                group.finish_grad_sync()

    def _is_ready(self, number: int, force_all_reduce: bool | None = False) -> None:
        """Start the reductions that are ready and have none before them that is not."""
        self._ready.add(number)
        while self._next in self._ready:
            self._starts[self._next](force_all_reduce=force_all_reduce)
            self._next += 1


def _in_backward_order(chunks: Sequence[DistributedDataParallel]) -> list[Any]:
    """All groups of buckets, in about the order in which a backward pass completes them."""
    placed = []
    for number, chunk in enumerate(chunks):
        places = {parameter: place for place, parameter in enumerate(chunk.module.parameters())}
        for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
            placed.append((number, min(places[parameter] for parameter in group.params), group))
    return [group for *_, group in sorted(placed, key=lambda entry: entry[:2], reverse=True)]

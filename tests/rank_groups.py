"""Several layouts, one after the other, in the processes of one job."""

from __future__ import annotations

import gc

import torch.distributed as dist
from torch.distributed import distributed_c10d


def leave_groups() -> None:
    """Free Megatron's groups and all models, but stay joined: the next layout makes its own; collective."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel

    for wrapped in [found for found in gc.get_objects() if isinstance(found, DistributedDataParallel)]:
        wrapped.module = None  # as in `MegatronPolicy.close`
    parallel_state.destroy_model_parallel()
    dist.barrier()
    for group in [g for g in distributed_c10d._world.pg_map if g is not dist.group.WORLD]:
        dist.destroy_process_group(group)
    gc.collect()
    gc.freeze()  # what remains need not be looked through after each layout

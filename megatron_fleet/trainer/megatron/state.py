"""Model and optimizer as Megatron's ``torch_dist`` checkpoint shards: written in one layout, read in any other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import ChainedOptimizer
from megatron.core.transformer.module import MegatronModule
from torch.distributed import checkpoint as torch_checkpoint
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

from megatron_fleet.config.errors import UserError
from megatron_fleet.platform.communicator import TorchCommunicator
from megatron_fleet.platform.megatron.adapt import cuda_calls_answered
from megatron_fleet.trainer.megatron import extra_state, shard_reader
from megatron_fleet.trainer.megatron.lora import Adapters

# Optimizer state in model space: loads under other tensor, pipeline and data sizes.
_CONTENT = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": False,
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
}


class _ThreadedSave(TorchDistSaveShardedStrategy):
    """Save in this process: Megatron's writer spawns a helper that imports everything again, which takes seconds each
    time.
    """

    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: Path) -> None:
        state, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
        torch_checkpoint.save(
            mcore_to_pyt_state_dict(state, False),
            storage_writer=torch_checkpoint.FileSystemWriter(checkpoint_dir),
            planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
        )


def save(path: Path, chunks: Sequence[DistributedDataParallel], optimizer: ChainedOptimizer) -> None:
    """Write this rank's part into ``path``; collective. The folder must be empty or not exist."""
    path.mkdir(parents=True, exist_ok=True)  # on every rank, so that all fail alike
    TorchCommunicator().barrier()
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    with cuda_calls_answered():
        dist_checkpointing.save(
            _describe(chunks, optimizer, is_loading=False),
            str(path),
            FullyParallelSaveStrategyWrapper(_ThreadedSave("torch_dist", 1), group),
            content_metadata=dict(_CONTENT),
        )


def load(path: Path, chunks: Sequence[DistributedDataParallel], optimizer: ChainedOptimizer) -> None:
    """Read what `save` wrote, in this or another layout; collective.

    Raises:
        UserError: only one of checkpoint and model has adapters; a file is damaged or holds code.
    """
    metadata = shard_reader.read_metadata(path)
    _check_kind(path, metadata, any(getattr(chunk.module, "adapters", None) is not None for chunk in chunks))
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    with cuda_calls_answered():
        try:
            state = shard_reader.load(_describe(chunks, optimizer, is_loading=True), path, metadata, group)
        except CheckpointException as error:  # no Exception, upstream; raised on every rank
            causes = [cause for cause, _ in error.failures.values()]
            raise next((c for c in causes if isinstance(c, UserError)), RuntimeError(str(error))) from error
    for index in range(len(chunks)):
        _replace_extra_states(path, state[f"model{index}"])
    with torch.no_grad():
        for index, chunk in enumerate(chunks):
            chunk.module.load_state_dict(state[f"model{index}"], strict=False)
        optimizer.load_state_dict(_regroup(state["optimizer"], optimizer))


def _replace_extra_states(path: Path, model: dict[str, Any]) -> None:
    """Replace the states that the modules would unpickle."""
    for name in [name for name in model if "_extra_state" in name.rpartition(".")[2]]:
        try:
            state = extra_state.rebuild(model.pop(name))
        except ValueError as error:
            raise UserError(f"{path}: {name} {error}; use another checkpoint.") from None
        if state is not None:
            model[name] = state


def _describe(
    chunks: Sequence[DistributedDataParallel], optimizer: ChainedOptimizer, is_loading: bool
) -> dict[str, Any]:
    """Describe every local tensor with its place in the whole model."""
    metadata = dict(_CONTENT, dp_cp_group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    state: dict[str, Any] = {
        f"model{index}": _describe_model(chunk.module, metadata) for index, chunk in enumerate(chunks)
    }
    state["optimizer"] = optimizer.sharded_state_dict(
        state if len(chunks) > 1 else state["model0"], is_loading=is_loading, metadata=metadata
    )
    return state


def _check_kind(path: Path, metadata: Metadata, adapters: bool) -> None:
    if any(name.startswith("adapters.") for name in metadata.state_dict_metadata) != adapters:
        held, now = ("all parameters", "above 0") if adapters else ("adapters alone", "0")
        raise UserError(
            f"{path}: holds {held} and policy.lora.rank is {now}; train as this run began, or choose another run.out."
        )


def _describe_model(module: MegatronModule, metadata: dict[str, Any]) -> ShardedStateDict:
    """Describe the model, or its adapters alone: their base model is frozen and comes from ``model.path`` again."""
    adapters: Adapters | None = getattr(module, "adapters", None)
    if adapters is None:
        return module.sharded_state_dict(metadata=metadata)
    return adapters.describe("adapters.", metadata["dp_cp_group"])


def _regroup(loaded: dict[Any, Any], optimizer: ChainedOptimizer) -> dict[Any, Any]:
    """Convert an optimizer's state between layouts with a separate optimizer for experts (``{0: …, 1: …}``, whenever
    expert > 1) and layouts without one.

    Tensors already have the form of this layout. The settings of parameter groups have the saved form.
    """
    parts, were_apart = optimizer.chained_optimizers, "optimizer" in loaded.get(0, {})
    if were_apart == (len(parts) > 1):
        return loaded
    saved = loaded[0] if were_apart else loaded
    (first, *_) = saved["optimizer"]["param_groups"]
    moved = {key: first[key] for key in ("lr", "step") if key in first}

    def settings(part: Any) -> dict[str, Any]:
        groups = [{k: v for k, v in group.items() if k != "params"} | moved for group in part.optimizer.param_groups]
        kind = "param_state_sharding_type"
        return {"optimizer": {"param_groups": groups}, kind: saved[kind]}

    if were_apart:
        return {key: value for key, value in loaded.items() if not isinstance(key, int)} | settings(parts[0])
    return {index: loaded[index] | settings(part) for index, part in enumerate(parts)}

"""Model and optimizer described as Megatron's ``torch_dist`` checkpoint shards, and read in any layout.

Each rank reads what it needs of both, part by part: besides them it holds one parameter and a few blocks, in host
memory and on its device.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedStateDict
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import ChainedOptimizer
from megatron.core.transformer.module import MegatronModule

from megatron_fleet.config.errors import UserError
from megatron_fleet.platform.communicator import TorchCommunicator, together
from megatron_fleet.trainer.megatron import extra_state, optimizer_shards
from megatron_fleet.trainer.megatron.lora import Adapters
from megatron_fleet.trainer.megatron.optimizer_shards import Box, parts
from megatron_fleet.trainer.megatron.shard_reader import ShardReader

CONTENT = {
    "distrib_optim_sharding_type": optimizer_shards.SHARDING,
    "distrib_optim_fully_reshardable_mem_efficient": False,
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
}
_BATCH_BYTES = 128 << 20
"""Loaded parameters that are handed to a model at once: it looks through all of its modules each time."""


def load(path: Path, chunks: Sequence[DistributedDataParallel], optimizer: ChainedOptimizer) -> None:
    """Read what `saving.Save` wrote, in this or another layout; collective.

    Raises:
        UserError: only one of checkpoint and model has adapters, or the checkpoint lacks a part, and nothing was
            changed; or a file is damaged or holds code.
    """
    with together(TorchCommunicator()):
        reader = ShardReader(path)
        _check_kind(reader, any(getattr(chunk.module, "adapters", None) is not None for chunk in chunks))
        described = [describe(chunk.module) for chunk in chunks]
        boxes = list(optimizer_shards.boxes(optimizer, described))
        _check_parts(reader, described, boxes)
        step = _step(reader)
        with torch.no_grad():
            for chunk, entries in zip(chunks, described, strict=True):
                _load_model(reader, chunk.module, entries)
            for box in boxes:
                reader.read_box(box.key, box.offsets, box.data)
        optimizer_shards.set_step(optimizer, step)


def describe(module: MegatronModule) -> ShardedStateDict:
    """Describe the model, or its adapters alone: their base model is frozen and comes from ``model.path`` again."""
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    adapters: Adapters | None = getattr(module, "adapters", None)
    if adapters is None:
        return module.sharded_state_dict(metadata=dict(CONTENT, dp_cp_group=group))
    return adapters.describe("adapters.", group)


def _check_kind(reader: ShardReader, adapters: bool) -> None:
    if any(name.startswith("adapters.") for name in reader.names()) != adapters:
        held, now = ("all parameters", "above 0") if adapters else ("adapters alone", "0")
        raise UserError(
            f"{reader.path} holds {held} and policy.lora.rank is {now}; train as this run began, or choose another "
            f"run.out."
        )


def _check_parts(reader: ShardReader, described: Sequence[ShardedStateDict], boxes: Sequence[Box]) -> None:
    """Raise UserError unless the checkpoint has every part of the model and of the optimizer."""
    for entry in (entry for chunk in described for entry in chunk.values()):
        if isinstance(entry, ShardedObject):
            reader.require_object(entry.unique_key)
            continue
        for shard, _ in parts(entry):
            reader.require_tensor(shard.key, shard.global_shape, shard.allow_shape_mismatch)
    for box in boxes:
        reader.require_tensor(box.key, box.shape, box.allow_shape_mismatch)


def _step(reader: ShardReader) -> int:
    try:
        return optimizer_shards.step_of(reader.common().get("optimizer"))
    except ValueError as error:
        raise UserError(f"{reader.path} {error}; use another checkpoint.") from None


def _load_model(reader: ShardReader, module: MegatronModule, described: ShardedStateDict) -> None:
    """Fill the parameters and buffers of a chunk; quantised ones take over what was read in full."""
    batch: dict[str, Any] = {}
    for name, entry in described.items():
        if isinstance(entry, ShardedObject):
            continue
        values = batch[name] = torch.empty(entry.data.shape, dtype=entry.data.dtype, device=entry.data.device)
        for shard, first in parts(entry):
            shape = (1,) * shard.prepend_axis_num + tuple(shard.data.shape)
            reader.read_box(shard.key, shard.global_offset, values.view(-1)[first : first + prod(shape)].view(shape))
        if sum(values.nbytes for values in batch.values()) >= _BATCH_BYTES:
            module.load_state_dict(batch, strict=False)
            batch = {}
    # All at once: a layer of several experts looks for the states of all of them.
    states = _extra_states(reader, described)
    with extra_state.allowed():
        module.load_state_dict(batch | states, strict=False)


def _extra_states(reader: ShardReader, described: ShardedStateDict) -> dict[str, torch.Tensor]:
    """States of modules besides parameters, replaced by what the modules may unpickle."""
    names: dict[str, list[str]] = defaultdict(list)
    for name, entry in described.items():
        if isinstance(entry, ShardedObject):
            names[entry.unique_key].append(name)
    found: dict[str, torch.Tensor] = {}
    for key, several in names.items():
        for name, saved in zip(several, reader.read_objects(key, len(several)), strict=True):
            try:
                state = extra_state.rebuild(saved)
            except ValueError as error:
                raise UserError(f"{reader.path}: {name} {error}; use another checkpoint.") from None
            if state is not None:
                found[name] = state
    return found

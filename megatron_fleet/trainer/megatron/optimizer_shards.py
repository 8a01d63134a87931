"""This rank's share of the optimizer state as boxes of the whole model's tensors, written and read where it lies.

Megatron's distributed optimizer gives each data-parallel rank a range of the flattened values of a parameter (of its
shard, under tensor or expert parallelism). Such a range is a few boxes: the rest of a row, whole rows, the start of a
row. Each box has a place in the whole tensor, so ranks exchange nothing for a checkpoint, and another layout reads the
boxes that its own ranges meet.

Names and shapes are those of Megatron's ``fully_reshardable`` checkpoints (``optimizer/distrib_optimizer.py``, 0.16 to
0.19), which gather the state of all data-parallel ranks on each of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor, ShardedTensorFactory
from megatron.core.optimizer import ChainedOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

BOX_VALUES = 8 << 20
"""Most values in a box: what a rank copies at a time while it saves."""
SHARDING = "fully_reshardable"

Offsets = tuple[int, ...]
Sizes = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Box:
    """A part of a tensor of optimizer state.

    Attributes:
        key: of the tensor in a checkpoint.
        shape: of the whole tensor.
        offsets: place of the box in it.
        data: the optimizer's own memory, with the shape of the box.
        is_main: whether this rank saves it, and not another that has a copy of the parameter.
        allow_shape_mismatch: whether the tensor may have another shape: vocabularies are padded for a layout.
    """

    key: str
    shape: tuple[int, ...]
    offsets: Offsets
    data: torch.Tensor
    is_main: bool
    allow_shape_mismatch: bool


def boxes(optimizer: ChainedOptimizer, described: Sequence[ShardedStateDict]) -> Iterator[Box]:
    """Master parameters and moments of this rank.

    Args:
        described: ``sharded_state_dict`` of each chunk; its data are the parameters themselves.
    """
    entries = {
        entry.data: entry
        for chunk in described
        for entry in chunk.values()
        if isinstance(entry, ShardedTensor | ShardedTensorFactory)
    }
    for part in optimizer.chained_optimizers:
        for parameter, start, end in _ranges(part):
            for name, values in _state(part, parameter).items():
                for shard, first in parts(entries[parameter]):
                    yield from _cut(shard, first, name, values, start, end)


def _ranges(part: DistributedOptimizer) -> Iterator[tuple[torch.Tensor, int, int]]:
    """Each parameter of which this rank has a range, with the start and end of that among its values."""
    for buffer in part.gbuf_ranges:
        for bucket in itertools.chain(*buffer.values()):
            for parameter, ranges in bucket["param_map"].items():
                yield parameter, ranges["param"].start, ranges["param"].end


def _state(part: DistributedOptimizer, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    """Live state ``[N]`` of this rank's range, in whatever dtype and memory it is kept."""
    group, order = part.model_param_group_index_map[parameter]
    held = part.optimizer.param_groups[group]["params"][order]
    state = part.optimizer.state[held]
    # A precision-aware optimizer holds the model's own parameter, and the master parameter as a state.
    return {
        "param": state.get("master_param", held).detach(),
        "exp_avg": state["exp_avg"],
        "exp_avg_sq": state["exp_avg_sq"],
    }


def parts(entry: ShardedTensor | ShardedTensorFactory) -> Iterator[tuple[ShardedTensor, int]]:
    """The parts of a parameter that have a place of their own in a checkpoint, each with the index of its first value.

    Their data are on the meta device.

    Raises:
        NotImplementedError: a part is no contiguous range of the parameter's values.
    """
    assert entry.data is not None  # the description of a live model
    entry = replace(entry, data=torch.empty(entry.data.shape, dtype=entry.data.dtype, device="meta"))
    built = nested_values(entry.build()) if isinstance(entry, ShardedTensorFactory) else [entry]
    end = 0
    for shard in sorted(built, key=lambda shard: shard.data.storage_offset()):
        if shard.data.storage_offset() != end or not shard.data.is_contiguous():
            raise NotImplementedError(f"{entry.key} is not stored as ranges of its values")
        yield shard, end
        end += shard.data.numel()


def _cut(shard: ShardedTensor, first: int, name: str, values: torch.Tensor, start: int, end: int) -> Iterator[Box]:
    """Boxes of ``shard``, which begins at value ``first`` of its parameter, in ``values``: those from ``start`` to
    ``end``.
    """
    lead = shard.prepend_axis_num
    # The last coordinate of a replica is the data-parallel rank: each of those has other values.
    is_main = tuple(shard.replica_id[:2]) == (0, 0)
    begin, stop = max(start, first), min(end, first + shard.data.numel())
    for offsets, sizes in range_boxes(tuple(shard.data.shape), begin - first, stop - first):
        count = prod(sizes)
        offsets = tuple(a + b for a, b in zip(shard.global_offset, (0,) * lead + offsets, strict=True))
        data = values[begin - start : begin - start + count].view((1,) * lead + sizes)
        key, shape = f"optimizer.state.{name}.{shard.key}", tuple(shard.global_shape)
        yield Box(key, shape, offsets, data, is_main, shard.allow_shape_mismatch)
        begin += count


def range_boxes(shape: tuple[int, ...], begin: int, end: int) -> Iterator[tuple[Offsets, Sizes]]:
    """Boxes that hold the values ``begin`` to ``end`` of a row-major tensor, in order, none above `BOX_VALUES`."""
    if begin >= end:
        return
    if not shape:
        yield (), ()
        return
    row = prod(shape[1:])
    while begin < end:
        index, inside = divmod(begin, row)
        whole = (end - begin) // row
        if inside or not whole or row > BOX_VALUES:
            stop = min(end, (index + 1) * row)
            for offsets, sizes in range_boxes(shape[1:], inside, inside + stop - begin):
                yield (index, *offsets), (1, *sizes)
        else:
            rows = min(whole, BOX_VALUES // row)
            stop = begin + rows * row
            yield (index, *(0,) * len(shape[1:])), (rows, *shape[1:])
        begin = stop


def settings(optimizer: ChainedOptimizer) -> dict[Any, Any]:
    """Settings of the parameter groups, as Megatron keeps them among the common state: the step count is needed again.

    Megatron's own way of getting them copies the moments where they are narrower than float32.
    """
    groups = [group for part in optimizer.chained_optimizers for group in part.optimizer.param_groups]
    step = max(int(group["step"]) for group in groups)  # a group without parameters is not counted on
    parts = [
        {
            "optimizer": {"param_groups": [_plain(group) | {"step": step} for group in part.optimizer.param_groups]},
            "param_state_sharding_type": SHARDING,
        }
        for part in optimizer.chained_optimizers
    ]
    return dict(enumerate(parts)) if len(parts) > 1 else parts[0]


def _plain(group: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in group.items() if v is None or isinstance(v, bool | int | float | str | tuple)}


def step_of(saved: Any) -> int:
    """The step count in `settings`, of whatever layout.

    Raises:
        ValueError: there is none.
    """
    try:
        groups = [part["optimizer"]["param_groups"] for part in ([saved] if "optimizer" in saved else saved.values())]
        (step,) = {group["step"] for group in itertools.chain(*groups)}
        return int(step)
    except (KeyError, TypeError, ValueError, AttributeError):
        raise ValueError("holds no step count of the optimizer") from None


def set_step(optimizer: ChainedOptimizer, step: int) -> None:
    """Set the step count. The other settings are given anew at each step."""
    for part in optimizer.chained_optimizers:
        for group in part.optimizer.param_groups:
            group["step"] = step
        for sub in getattr(part.optimizer, "sub_optimizers", ()):
            for state in sub.state.values():
                if "step" in state:  # PyTorch's own optimizer counts for each parameter
                    state["step"].fill_(step)

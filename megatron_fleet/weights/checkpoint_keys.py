"""Checkpoint keys of a weight table's matrices in Megatron-Core 0.16 to 0.19, and of the extra states it expects."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from megatron_fleet.models.model import Model
from megatron_fleet.weights.mapping import Matrix, stack_key

_WITH_STATE = re.compile(
    r"(.+\.(?:linear_\w+|\w*layernorm|enorm|hnorm|eh_proj|out_norm|out_proj|in_proj))\.weight(?:\.query)?"
)
"""Modules with an extra state: linear layers and, under Transformer Engine 2, standalone norms.

A layer whose weight is stored in parts has one state, and the part ``query``."""


@dataclass(frozen=True, slots=True)
class Address:
    """Location of a matrix: ``key`` at the leading indices ``lead``; ``counts`` has the size of each leading axis."""

    key: str
    lead: tuple[int, ...]
    counts: tuple[int, ...]


def address(model: Model, key: str, expert: int | None, numbered: bool) -> Address:
    """Address of a key that contains the layer's number.

    Args:
        numbered: leave the number in the key, as Megatron does when ``moe_layer_freq`` is a list, instead of making it
            the first index.
    """
    lead, counts = ((), ()) if expert is None else ((expert,), (model.experts,))
    if not numbered:
        stacked, layer = stack_key(key)
        if layer is not None:
            return Address(stacked, (layer, *lead), (model.layers, *counts))
    return Address(key, lead, counts)


def extra_states(model: Model, matrix: Matrix, numbered: bool) -> Iterator[str]:
    """Keys of the extra states of the modules that hold a matrix; without them a checkpoint does not load.

    They are empty unless Transformer Engine trains with delayed FP8 scaling.
    """
    for name in (matrix.key, *matrix.aliases):
        module = _WITH_STATE.fullmatch(name)
        if module is None:
            continue
        yield _state(address(model, f"{module[1]}._extra_state", matrix.expert, numbered))
        # Megatron-Core 0.16 gives MTP layers one more.
        if name.startswith("mtp.") and module[1].endswith("linear_proj"):
            attention = module[1].removesuffix("linear_proj")
            yield _state(address(model, f"{attention}core_attention._extra_state", None, numbered))


def _state(place: Address) -> str:
    index, count = (".".join(map(str, v)) for v in (place.lead or (0,), place.counts or (1,)))
    return f"{place.key}/shard_{index}_{count}"

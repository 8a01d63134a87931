"""The vocabulary of a weight table: which HF tensors make up which Megatron parameter, and how."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Layout = Literal["copy", "concat", "qkv", "vocab"]
"""How the rows of the HF tensors are arranged in the Megatron parameter.

``copy``: one HF tensor, row for row.
``concat``: the HF tensors one after another; each of them is sharded by itself (gate and up of SwiGLU).
``qkv``: per query group its query heads, then its key head, then its value head.
``vocab``: one HF tensor, row for row, then rows of zeros up to a multiple of the tensor-parallel size.
"""


@dataclass(frozen=True, slots=True)
class Leaf:
    """One HF tensor. ``{i}`` in the name is the global layer index; ``shape`` names sizes of ``Architecture.dims``.

    ``tied`` names the HF tensor that stands in for this one when the model ties its word embeddings; the tensor itself
    is then no part of the model.
    """

    name: str
    shape: tuple[str, ...]
    tied: str | None = None


@dataclass(frozen=True, slots=True)
class Rule:
    """One Megatron parameter.

    Attributes:
        names: its name under each of Megatron's layer specs (the local spec first, then Transformer Engine's where it
            fuses a norm into the following linear); ``{i}`` is the global layer index.
        leaves: the HF tensors it is made of.
        layout: see ``Layout``.
        shard: the axis that tensor parallelism splits; ``None`` = every tensor-parallel rank holds all of it.
    """

    names: tuple[str, ...]
    leaves: tuple[Leaf, ...]
    layout: Layout = "copy"
    shard: Literal[0, 1] | None = None


@dataclass(frozen=True, slots=True)
class Architecture:
    """One model family as data.

    Attributes:
        dims: raw ``config.json`` → named sizes; must give ``layers``, ``vocab``, ``groups`` (query groups) and ``head``
            (rows per head). Raises UserError for a variant that the rules do not describe.
        before, layer, after: rules in the order of the HF checkpoint.
        inert: regular expressions of HF tensors that may be in the files and are not weights of the model.
    """

    dims: Callable[[Mapping[str, Any]], dict[str, int]]
    before: tuple[Rule, ...]
    layer: tuple[Rule, ...]
    after: tuple[Rule, ...]
    inert: tuple[str, ...] = ()

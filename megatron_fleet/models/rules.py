"""Rules of the weight tables: names of tensors, and how HF's make up Megatron's. Pure data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

HF = "{body}layers.{i}."
LAYER = "decoder.layers.{i}."
ATTENTION = LAYER + "self_attention."
MTP = "mtp.layers.{k}."

Layout = Literal["copy", "concat", "qkv"]
"""Arrangement of the HF tensors' rows in the Megatron tensor.

``copy``: one HF tensor, row for row.
``concat``: the HF tensors concatenated (gate and up of SwiGLU).
``qkv``: for each key-value head, its query heads, then (if there are) their gates, then its key head, then its value
head.
"""


@dataclass(frozen=True, slots=True)
class Rows:
    """Some rows of a tensor: ``length`` rows from ``start`` on, once or again after every ``period`` rows."""

    start: int
    length: int
    period: int | None = None


@dataclass(frozen=True, slots=True)
class Stack:
    """A tensor in which some releases store this part of all experts.

    Attributes:
        name: name of that tensor.
        part, parts: an expert's rows in it are ``parts`` equal parts, of which this is number ``part``.
    """

    name: str
    part: int = 0
    parts: int = 1


@dataclass(frozen=True, slots=True)
class Leaf:
    """One HF tensor, or some rows of it.

    In names, ``{body}`` is the architecture's prefix, ``{i}`` the layer and ``{e}`` the expert.

    Attributes:
        shape: names of the tensor's sizes (`mapping.sizes`).
        tied: tensor that replaces this one when the model ties its word embeddings; this tensor is then not part of
            the model.
        rows: the rows meant; ``None`` = all.
        stack: where the tensor is stored if not under its own name.
    """

    name: str
    shape: tuple[str, ...]
    tied: str | None = None
    rows: Rows | None = None
    stack: Stack | None = None


@dataclass(frozen=True, slots=True)
class Rule:
    """One Megatron tensor of a ``torch_dist`` checkpoint.

    Attributes:
        key: checkpoint key with numbered layers: ``decoder.layers.{i}.…``. A rule whose leaves contain ``{e}``
            describes one expert of a tensor that stacks all of them.
        leaves: HF tensors that make it up.
        layout: see ``Layout``.
        aliases: keys that other Megatron layer specs use for the same content.
        vocabulary: the rows may be followed by zero-filled padding rows.
        float32: kept in float32 regardless of the model's dtype.
        offset: difference of Megatron's values from HF's.
    """

    key: str
    leaves: tuple[Leaf, ...]
    layout: Layout = "copy"
    aliases: tuple[str, ...] = ()
    vocabulary: bool = False
    float32: bool = False
    offset: float = 0.0


@dataclass(frozen=True, slots=True)
class Prediction:
    """Names of a multi-token prediction layer's tensors. ``{i}`` counts on after the last layer, ``{k}`` from 0.

    Attributes:
        layer: prefix of its transformer layer.
        embedding_norm, hidden_norm, projection, norm: norms of the next token's embedding and of the last layer's
            output, the projection of both, and the norm at the end.
        repeated: tensors that duplicate another tensor, mapped to that tensor: ``embedding`` or ``head``.
        pattern: regular expression for the names of all its tensors; ``None``: those that begin with ``layer``.
    """

    layer: str
    embedding_norm: str
    hidden_norm: str
    projection: str
    norm: str
    repeated: dict[str, Literal["embedding", "head"]] = field(default_factory=dict)
    pattern: str | None = None


DEEPSEEK_PREDICTION = Prediction(
    layer=HF,
    embedding_norm=HF + "enorm.weight",
    hidden_norm=HF + "hnorm.weight",
    projection=HF + "eh_proj.weight",
    norm=HF + "shared_head.norm.weight",
    repeated={HF + "embed_tokens.weight": "embedding", HF + "shared_head.head.weight": "head"},
)
"""DeepSeek-V3's names: further layers after the last one."""

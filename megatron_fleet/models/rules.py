"""The vocabulary of a weight table: which HF tensors make up which Megatron tensor, and how."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Layout = Literal["copy", "concat", "qkv"]
"""How the rows of the HF tensors are arranged in the Megatron tensor.

``copy``: one HF tensor, row for row.
``concat``: the HF tensors one after another (gate and up of SwiGLU).
``qkv``: per key-value head its query heads, then its key head, then its value head.
"""


@dataclass(frozen=True, slots=True)
class Leaf:
    """One HF tensor.

    In the name ``{body}`` stands for the architecture's prefix, ``{i}`` for the layer and ``{e}`` for the expert.
    ``shape`` names sizes (`sizes.sizes`). ``tied`` names the tensor that stands in for this one when the model ties its
    word embeddings; the tensor itself is then no part of the model.
    """

    name: str
    shape: tuple[str, ...]
    tied: str | None = None


@dataclass(frozen=True, slots=True)
class Rule:
    """One Megatron tensor of a ``torch_dist`` checkpoint.

    Attributes:
        key: its key, layers by number: ``decoder.layers.{i}.…``. A rule whose leaves name ``{e}`` describes one expert
            of a tensor that stacks all of them.
        leaves: the HF tensors it is made of.
        layout: see ``Layout``.
        aliases: keys under which other layer specs of Megatron look for the same content.
        vocabulary: rows may be followed by rows of padding, which hold zeros.
        float32: kept in float32 whatever the type of the model.
    """

    key: str
    leaves: tuple[Leaf, ...]
    layout: Layout = "copy"
    aliases: tuple[str, ...] = ()
    vocabulary: bool = False
    float32: bool = False


REQUIRED: Any = object()
"""The default of a ``Field`` that must be in ``config.json``."""


@dataclass(frozen=True, slots=True)
class Field:
    """One field of ``config.json`` that is an attribute of `model.Model`.

    Attributes:
        name: its name in ``config.json``; the form that is written.
        to: attribute of ``Model``.
        default: its value where the file does not have it.
        also: names that other versions of transformers give it.
    """

    name: str
    to: str
    default: Any = REQUIRED
    also: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Architecture:
    """One model family as data.

    Attributes:
        model_types: values of ``model_type`` in ``config.json``.
        fields: of ``config.json``, see ``Field``.
        given: attributes of ``Model`` that are the same in the whole family.
        fixed: fields that change the computation and have one supported value, also the one that absence means; in
            brackets: the field is a list, and each item has that value.
        ignored: further fields that do not change what the model computes.
        text: field of ``config.json`` that holds the language model's own configuration.
        body, head: prefix of the decoder's tensors and name of the output layer.
        passthrough: regular expressions of tensors that Megatron does not hold: stale buffers, vision towers. They are
            copied byte for byte.
        moe: how ``config.json`` says which layers have experts, see `hf_config`.
        partial_rotary: ``partial_rotary_factor`` says how much of a head is rotated; else all of it is.
        rotary_fraction: the part of a head that is rotated, where ``config.json`` does not say it.
    """

    model_types: tuple[str, ...]
    fields: tuple[Field, ...]
    given: dict[str, Any] = field(default_factory=dict)
    fixed: dict[str, Any] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    text: str | None = None
    body: str = "model."
    head: str = "lm_head.weight"
    passthrough: tuple[str, ...] = ()
    moe: Literal["none", "first_dense", "every_nth"] = "none"
    partial_rotary: bool = False
    rotary_fraction: float = 1.0

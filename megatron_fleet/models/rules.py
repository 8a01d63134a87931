"""Vocabulary of a weight table: the HF tensors that make up a Megatron tensor, and their arrangement."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Layout = Literal["copy", "concat", "qkv"]
"""Arrangement of the HF tensors' rows in the Megatron tensor.

``copy``: one HF tensor, row for row.
``concat``: the HF tensors concatenated (gate and up of SwiGLU).
``qkv``: for each key-value head, its query heads, then its key head, then its value head.
"""


@dataclass(frozen=True, slots=True)
class Leaf:
    """One HF tensor.

    In the name, ``{body}`` is the architecture's prefix, ``{i}`` the layer and ``{e}`` the expert. ``shape`` names
    sizes (`sizes.sizes`). ``tied`` names the tensor that replaces this one when the model ties its word embeddings;
    this tensor is then not part of the model.
    """

    name: str
    shape: tuple[str, ...]
    tied: str | None = None


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
    """

    key: str
    leaves: tuple[Leaf, ...]
    layout: Layout = "copy"
    aliases: tuple[str, ...] = ()
    vocabulary: bool = False
    float32: bool = False


REQUIRED: Any = object()
"""Default of a ``Field`` that is required in ``config.json``."""


@dataclass(frozen=True, slots=True)
class Field:
    """Mapping of one ``config.json`` field to an attribute of `model.Model`.

    Attributes:
        name: field name in ``config.json``, used for writing.
        to: attribute name in ``Model``.
        default: value if the field is absent.
        also: alternative names used by other versions of transformers.
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
        fields: supported fields of ``config.json``, see ``Field``.
        given: attributes of ``Model`` that are constant across the family.
        fixed: fields that affect the computation but have only one supported value, which absence also implies; a value
            in a list means that the field is a list whose items all have that value.
        ignored: other fields that do not affect the computation.
        text: field of ``config.json`` that holds the language model's own configuration.
        body, head: prefix of the decoder's tensors, name of the output layer.
        passthrough: regular expressions for tensors that Megatron does not hold (stale buffers, vision towers), which
            are copied byte for byte.
        moe: convention by which ``config.json`` marks layers with experts, see `hf_config`.
        partial_rotary: ``partial_rotary_factor`` gives the rotated fraction of a head; otherwise all of it is.
        rotary_fraction: rotated fraction of a head where ``config.json`` does not specify it.
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

"""Vocabulary of a weight table: the HF tensors that make up a Megatron tensor, and their arrangement."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

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
        most: largest integer that the family supports; ``None``: that of `hf_config`.
    """

    name: str
    to: str
    default: Any = REQUIRED
    also: tuple[str, ...] = ()
    most: int | None = None


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


_LAYER = "{body}layers.{i}."
DEEPSEEK_PREDICTION = Prediction(
    layer=_LAYER,
    embedding_norm=_LAYER + "enorm.weight",
    hidden_norm=_LAYER + "hnorm.weight",
    projection=_LAYER + "eh_proj.weight",
    norm=_LAYER + "shared_head.norm.weight",
    repeated={_LAYER + "embed_tokens.weight": "embedding", _LAYER + "shared_head.head.weight": "head"},
)
"""DeepSeek-V3's names: further layers after the last one."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """One model family as data.

    Attributes:
        model_types: values of ``model_type`` in ``config.json``.
        fields: supported fields of ``config.json``, see ``Field``.
        given: attributes of ``Model`` that are constant across the family.
        fixed: fields that affect the computation but have only one supported value, which absence also implies; a value
            in a list means that the field is a list whose items all have that value, a tuple has several names for the
            one value.
        ignored: other fields that do not affect the computation.
        text: field of ``config.json`` that holds the language model's own configuration.
        body, head: prefix of the decoder's tensors, name of the output layer.
        passthrough: regular expressions for tensors that Megatron does not hold (stale buffers, vision towers), which
            are copied byte for byte.
        moe: convention by which ``config.json`` marks layers with experts, see `hf_config`.
        hybrid: ``layer_types`` tells Gated DeltaNet layers from attention layers.
        prediction: names of the tensors of a multi-token prediction layer.
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
    moe: Literal["none", "first_dense", "every_nth", "all"] = "none"
    hybrid: bool = False
    prediction: Prediction = DEEPSEEK_PREDICTION
    partial_rotary: bool = False
    rotary_fraction: float = 1.0

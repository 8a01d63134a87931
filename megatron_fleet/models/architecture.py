"""Interface of a model family to the shared code: its fields of ``config.json``, and what it brings of its own."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from megatron_fleet.models.fields import Field, Fields
from megatron_fleet.models.model import Mixer, Model
from megatron_fleet.models.rules import DEEPSEEK_PREDICTION, Prediction


class ExpertLayers(Protocol):
    """Convention by which a family's ``config.json`` says which layers have experts."""

    def read(self, fields: Fields, values: dict[str, Any]) -> tuple[bool, ...]:
        """Return whether each layer has experts.

        Args:
            values: attributes of ``Model`` read so far, among them ``layers`` and ``expert_ffn``; may be added to.
        """
        ...

    def write(self, model: Model) -> dict[str, Any]:
        """Return the fields from which `read` reads the same."""
        ...


@dataclass(frozen=True, slots=True)
class Architecture:
    """A kind of model of a family, as data: what its ``config.json`` may say and what that computes.

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
        experts: convention by which ``config.json`` marks layers with experts; ``None``: the family is dense.
        mixer: the family's own layer in the place of attention, which reads its own fields.
        prediction: names of the tensors of a multi-token prediction layer.
        partial_rotary: ``partial_rotary_factor`` gives the rotated fraction of a head; otherwise all of it is.
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
    experts: ExpertLayers | None = None
    mixer: type[Mixer] | None = None
    prediction: Prediction = DEEPSEEK_PREDICTION
    partial_rotary: bool = False


BASE = (
    Field("num_hidden_layers", "layers"),
    Field("hidden_size", "hidden"),
    Field("vocab_size", "vocab"),
    Field("intermediate_size", "ffn"),
    Field("max_position_embeddings", "context", default=None),
    Field("num_attention_heads", "heads"),
    Field("rms_norm_eps", "norm_eps"),
)
GROUPED_QUERY = (
    Field("num_key_value_heads", "groups"),
    Field("head_dim", "head", default=None),
)
LATENT = (
    Field("kv_lora_rank", "kv_lora"),
    Field("q_lora_rank", "q_lora", default=None),
    Field("qk_nope_head_dim", "nope"),
    Field("qk_rope_head_dim", "rotated"),
    Field("v_head_dim", "value"),
)
EXPERTS = (
    Field("n_routed_experts", "experts", also=("num_experts", "num_local_experts")),
    Field("num_experts_per_tok", "experts_per_token"),
    Field("moe_intermediate_size", "expert_ffn"),
)
GROUPED_ROUTING = (
    Field("routed_scaling_factor", "routing_scale"),
    Field("n_group", "expert_groups"),
    Field("topk_group", "top_groups"),
)
PREDICTION = (Field("num_nextn_predict_layers", "mtp", default=0, also=("num_mtp_layers",)),)

DENSE_FIXED: dict[str, Any] = {"hidden_act": "silu", "use_sliding_window": False, "layer_types": ["full_attention"]}

WINDOW = ("sliding_window", "max_window_layers")
"""No effect while ``use_sliding_window`` is false."""

STALE_FREQUENCIES = r"{body}layers\.\d+\.self_attn\.rotary_emb\.inv_freq"
"""A buffer that old versions saved; every framework recomputes it."""

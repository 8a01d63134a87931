"""Qwen3.5, 3.6 and 3.8: three Gated DeltaNet layers for each layer of gated attention; dense and MoE.

Text-only files and those of the published vision-language models, whose vision tower passes through. On text alone the
three axes of the rotary embedding have equal positions, so it is a plain one over a quarter of each head.
"""

from dataclasses import replace
from typing import Any

from megatron_fleet.models.architecture import BASE, GROUPED_QUERY, Architecture
from megatron_fleet.models.fields import Field, Fields
from megatron_fleet.models.model import Model
from megatron_fleet.models.qwen3_5.delta_net import GatedDeltaNet
from megatron_fleet.models.rules import Prediction

# The norms and the projection of a prediction layer have one name each, whatever the number of layers.
PREDICTION = (Field("mtp_num_hidden_layers", "mtp", default=0, most=1),)

DENSE = Architecture(
    model_types=("qwen3_5_text",),
    fields=(*BASE, GROUPED_QUERY[0], Field("head_dim", "head"), *PREDICTION),
    given={"qk_norm": True, "output_gate": True, "zero_centered_norms": True},
    fixed={
        "hidden_act": "silu",
        "attention_bias": False,
        "attn_output_gate": True,
        "output_gate_type": ("swish", "silu"),
        # Engines keep the layers' state in it.
        "mamba_ssm_dtype": "float32",
        "mtp_use_dedicated_embeddings": False,
    },
    ignored=("language_model_only",),
    passthrough=(r"model\.visual\..+",),
    mixer=GatedDeltaNet,
    partial_rotary=True,
    prediction=Prediction(
        layer="mtp.layers.{k}.",
        embedding_norm="mtp.pre_fc_norm_embedding.weight",
        hidden_norm="mtp.pre_fc_norm_hidden.weight",
        projection="mtp.fc.weight",
        norm="mtp.norm.weight",
        pattern=r"mtp\..+",
    ),
)


class AllLayers:
    """Experts in every layer."""

    def read(self, fields: Fields, values: dict[str, Any]) -> tuple[bool, ...]:
        """See ``ExpertLayers``."""
        # The family has no dense layers, so their size is arbitrary.
        values["ffn"] = values["expert_ffn"]
        return (True,) * int(values["layers"])

    def write(self, model: Model) -> dict[str, Any]:
        """See ``ExpertLayers``."""
        return {}


EXPERT = replace(
    DENSE,
    model_types=("qwen3_5_moe_text",),
    fields=(
        *(field for field in DENSE.fields if field.to != "ffn"),
        Field("num_experts", "experts", also=("num_local_experts",)),
        Field("num_experts_per_tok", "experts_per_token"),
        Field("moe_intermediate_size", "expert_ffn"),
        Field("shared_expert_intermediate_size", "shared_ffn"),
    ),
    given={**DENSE.given, "renormalise": True, "shared_gate": True},
    fixed={**DENSE.fixed, "mlp_only_layers": []},
    experts=AllLayers(),
)


def _with_vision(text: Architecture, model_type: str) -> Architecture:
    return replace(
        text,
        model_types=(model_type,),
        text="text_config",
        body="model.language_model.",
        ignored=(*text.ignored, "vision_config"),
    )


ARCHITECTURES = (DENSE, EXPERT, _with_vision(DENSE, "qwen3_5"), _with_vision(EXPERT, "qwen3_5_moe"))

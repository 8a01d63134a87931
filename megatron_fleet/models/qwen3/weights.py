"""Qwen3: grouped-query attention with query and key norms; dense, MoE, and the language model of Qwen3-VL."""

from dataclasses import replace
from typing import Any

from megatron_fleet.config.errors import UserError
from megatron_fleet.models.architecture import (
    BASE,
    DENSE_FIXED,
    EXPERTS,
    GROUPED_QUERY,
    STALE_FREQUENCIES,
    WINDOW,
    Architecture,
)
from megatron_fleet.models.fields import Field, Fields
from megatron_fleet.models.model import Model

DENSE = Architecture(
    model_types=("qwen3",),
    # transformers' default for an absent head_dim is not derived from other fields, so it must be present.
    fields=(*BASE, GROUPED_QUERY[0], Field("head_dim", "head")),
    given={"qk_norm": True},
    fixed={**DENSE_FIXED, "attention_bias": False},
    ignored=WINDOW,
    passthrough=(STALE_FREQUENCIES,),
)
"""Tied or untied word embeddings."""


class EveryNth:
    """Layers with experts as in transformers: layer i has them if i + 1 is a multiple of a step, with exceptions."""

    def read(self, fields: Fields, values: dict[str, Any]) -> tuple[bool, ...]:
        """See ``ExpertLayers``."""
        step, without = fields.integer("decoder_sparse_step", 1, default=1), fields.optional("mlp_only_layers", [])
        if not isinstance(without, list):
            raise UserError(f"config.json: mlp_only_layers={without!r} is not a list of layers; correct the file.")
        return tuple(i not in without and (i + 1) % step == 0 for i in range(values["layers"]))

    def write(self, model: Model) -> dict[str, Any]:
        """See ``ExpertLayers``."""
        dense = [i for i, experts in enumerate(model.moe_layers) if not experts]
        return {"decoder_sparse_step": 1, "mlp_only_layers": dense}


EXPERT = Architecture(
    model_types=("qwen3_moe",),
    fields=(
        *BASE,
        *GROUPED_QUERY,
        Field("num_experts", "experts", also=("num_local_experts",)),
        *EXPERTS[1:],
        Field("norm_topk_prob", "renormalise", default=False),
    ),
    given={"qk_norm": True},
    fixed={
        **DENSE_FIXED,
        "attention_bias": False,
        "qkv_bias": False,
        "use_qk_norm": True,
        "shared_expert_intermediate_size": 0,
    },
    ignored=WINDOW,
    passthrough=(STALE_FREQUENCIES,),
    experts=EveryNth(),
)
"""30B-A3B, 235B-A22B: softmax router, no shared expert."""

VISION = replace(
    DENSE,
    model_types=("qwen3_vl",),
    text="text_config",
    body="model.language_model.",
    passthrough=(*DENSE.passthrough, r"model\.visual\..+"),
    ignored=(*DENSE.ignored, "vision_config"),
)
"""Qwen3-VL, dense: the vision tower passes through. On text alone the three axes of its rotary embedding have equal
positions, so it is equivalent to Qwen3."""

ARCHITECTURES = (DENSE, EXPERT, VISION)

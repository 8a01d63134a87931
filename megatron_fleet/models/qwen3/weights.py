"""Qwen3: grouped-query attention with query and key norms; dense, MoE, and the language model of Qwen3-VL."""

from dataclasses import replace

from megatron_fleet.models.fields import BASE, DENSE_FIXED, EXPERTS, GROUPED_QUERY, STALE_FREQUENCIES, WINDOW
from megatron_fleet.models.rules import Architecture, Field

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
    moe="every_nth",
)
"""30B-A3B, 235B-A22B: softmax router, no shared expert."""

VISION = replace(
    DENSE,
    model_types=("qwen3_vl",),
    text="text_config",
    body="model.language_model.",
    passthrough=(*DENSE.passthrough, r"model\.visual\..+"),
    ignored=(
        *DENSE.ignored,
        *("vision_config", "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"),
    ),
)
"""Qwen3-VL, dense: the vision tower passes through. On text alone the three axes of its rotary embedding have equal
positions, so it is equivalent to Qwen3."""

ARCHITECTURES = (DENSE, EXPERT, VISION)

"""GLM-4.5 and GLM-4.6: grouped-query attention with partly rotated heads, DeepSeek's router."""

from megatron_fleet.weights.architectures.fields import (
    BASE,
    EXPERTS,
    GROUPED_QUERY,
    GROUPED_ROUTING,
    PREDICTION,
    STALE_FREQUENCIES,
)
from megatron_fleet.weights.rules import Architecture, Field

ARCHITECTURE = Architecture(
    model_types=("glm4_moe",),
    fields=(
        *BASE,
        *GROUPED_QUERY,
        *EXPERTS,
        *GROUPED_ROUTING,
        *PREDICTION,
        Field("attention_bias", "qkv_bias", default=False),
        Field("use_qk_norm", "qk_norm", default=False),
    ),
    given={"router_score": "sigmoid", "router_bias": True, "renormalise": True},
    fixed={"hidden_act": "silu", "norm_topk_prob": True, "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    carried=(STALE_FREQUENCIES,),
    moe="first_dense",
    partial_rotary=True,
    rotary_fraction=0.5,
)

"""GLM-4.5 to 4.7: grouped-query attention with partially rotated heads, DeepSeek's router.

GLM-4.7-Flash has DeepSeek-V3's layers instead.
"""

from dataclasses import replace

from megatron_fleet.models.architecture import (
    BASE,
    EXPERTS,
    GROUPED_QUERY,
    GROUPED_ROUTING,
    PREDICTION,
    STALE_FREQUENCIES,
    Architecture,
)
from megatron_fleet.models.deepseek_v3.weights import ARCHITECTURE as DEEPSEEK_V3
from megatron_fleet.models.deepseek_v3.weights import FirstDense
from megatron_fleet.models.fields import Field

GLM_45 = Architecture(
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
    passthrough=(STALE_FREQUENCIES,),
    experts=FirstDense(),
    partial_rotary=True,
)
FLASH = replace(DEEPSEEK_V3, model_types=("glm4_moe_lite",))
ARCHITECTURES = (GLM_45, FLASH)

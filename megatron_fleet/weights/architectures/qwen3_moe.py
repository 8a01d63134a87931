"""Qwen3 mixture of experts (30B-A3B, 235B-A22B): softmax router, no shared expert."""

from megatron_fleet.weights.architectures.fields import (
    BASE,
    DENSE_FIXED,
    EXPERTS,
    GROUPED_QUERY,
    STALE_FREQUENCIES,
    WINDOW,
)
from megatron_fleet.weights.rules import Architecture, Field

ARCHITECTURE = Architecture(
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
    carried=(STALE_FREQUENCIES,),
    moe="every_nth",
)

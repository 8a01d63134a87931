"""DeepSeek-V3 and R1, Moonlight: latent attention, sigmoid router with a per-expert bias."""

from megatron_fleet.models.fields import (
    BASE,
    EXPERTS,
    GROUPED_ROUTING,
    LATENT,
    PREDICTION,
    STALE_FREQUENCIES,
)
from megatron_fleet.models.rules import Architecture

ARCHITECTURE = Architecture(
    model_types=("deepseek_v3",),
    fields=(*BASE, *LATENT, *EXPERTS, *GROUPED_ROUTING, *PREDICTION),
    given={"qk_norm": True, "router_score": "sigmoid", "router_bias": True, "renormalise": True},
    fixed={
        "hidden_act": "silu",
        "attention_bias": False,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "rope_interleave": True,
    },
    # No effect on latent attention: number of heads, rotated size, and the sum of both sizes.
    ignored=("num_key_value_heads", "head_dim", "qk_head_dim"),
    passthrough=(STALE_FREQUENCIES,),
    moe="first_dense",
)
ARCHITECTURES = (ARCHITECTURE,)

"""Qwen2 and Qwen2.5, dense: grouped-query attention with biases on query, key and value."""

from megatron_fleet.models.architecture import BASE, DENSE_FIXED, GROUPED_QUERY, STALE_FREQUENCIES, WINDOW, Architecture

ARCHITECTURES = (
    Architecture(
        model_types=("qwen2",),
        fields=(*BASE, *GROUPED_QUERY),
        given={"qkv_bias": True},
        fixed={**DENSE_FIXED, "use_mrope": False},
        ignored=WINDOW,
        passthrough=(STALE_FREQUENCIES,),
    ),
)

"""Qwen3, dense: grouped-query attention with query and key norms, tied or untied word embeddings."""

from megatron_fleet.weights.architectures.fields import BASE, DENSE_FIXED, GROUPED_QUERY, STALE_FREQUENCIES, WINDOW
from megatron_fleet.weights.rules import Architecture, Field

ARCHITECTURE = Architecture(
    model_types=("qwen3",),
    # transformers' default for an absent head_dim is no ratio of other fields, so it must be there.
    fields=(*BASE, GROUPED_QUERY[0], Field("head_dim", "head")),
    given={"qk_norm": True},
    fixed={**DENSE_FIXED, "attention_bias": False},
    ignored=WINDOW,
    carried=(STALE_FREQUENCIES,),
)

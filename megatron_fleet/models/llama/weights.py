"""Llama 3, 3.1, 3.2 (text) and 3.3."""

from megatron_fleet.models.architecture import BASE, GROUPED_QUERY, STALE_FREQUENCIES, Architecture
from megatron_fleet.models.fields import Field

ARCHITECTURES = (
    Architecture(
        model_types=("llama",),
        fields=(*BASE, Field("num_key_value_heads", "groups", default=None), *GROUPED_QUERY[1:]),
        fixed={"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
        passthrough=(STALE_FREQUENCIES,),
    ),
)

"""DeepSeek-V3 and R1, Moonlight: latent attention, sigmoid router with a per-expert bias."""

from __future__ import annotations

from typing import Any

from megatron_fleet.config.errors import UserError
from megatron_fleet.models.architecture import (
    BASE,
    EXPERTS,
    GROUPED_ROUTING,
    LATENT,
    PREDICTION,
    STALE_FREQUENCIES,
    Architecture,
)
from megatron_fleet.models.fields import Fields
from megatron_fleet.models.model import Model


class FirstDense:
    """Layers with experts after some dense ones: by the number of those, by a list of all layers, or both."""

    def read(self, fields: Fields, values: dict[str, Any]) -> tuple[bool, ...]:
        """See ``ExpertLayers``; adds the shared experts."""
        fields.check("moe_layer_freq", 1)
        pattern = self._pattern(fields, values["layers"])
        values["shared_ffn"] = fields.integer("n_shared_experts", 0) * values["expert_ffn"]
        return pattern

    @staticmethod
    def _pattern(fields: Fields, layers: int) -> tuple[bool, ...]:
        kinds = fields.optional("mlp_layer_types")
        listed = None
        if kinds is not None:
            if not isinstance(kinds, list) or len(kinds) != layers or not all(k in ("dense", "sparse") for k in kinds):
                raise UserError(
                    f"config.json: mlp_layer_types={kinds!r} is not dense or sparse for each of the {layers} layers; "
                    f"correct the file."
                )
            listed = tuple(kind == "sparse" for kind in kinds)
        if listed is not None and fields.optional("first_k_dense_replace") is None:
            return listed
        dense = fields.integer("first_k_dense_replace", 0)
        counted = tuple(i >= dense for i in range(layers))
        if listed not in (None, counted):
            raise UserError(
                f"config.json: first_k_dense_replace={dense} and mlp_layer_types={kinds!r} name different layers; "
                f"correct the file."
            )
        return counted

    def write(self, model: Model) -> dict[str, Any]:
        """See ``ExpertLayers``."""
        shared = model.shared_ffn // model.expert_ffn
        return {"first_k_dense_replace": model.moe_layers.index(True), "moe_layer_freq": 1, "n_shared_experts": shared}


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
    experts=FirstDense(),
)
ARCHITECTURES = (ARCHITECTURE,)

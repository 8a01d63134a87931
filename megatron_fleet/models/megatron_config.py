"""Translation between `model.Model` and the arguments of Megatron-Core's ``TransformerConfig`` and ``GPTModel``.

Every argument that affects the computation is passed, even if it equals Megatron's default: defaults differ between
releases, and those of latent attention are DeepSeek-V3's. No torch, no Megatron.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, get_args, get_type_hints

from megatron_fleet.config.errors import UserError
from megatron_fleet.models.model import Model, Rope
from megatron_fleet.models.registry import ARCHITECTURES
from megatron_fleet.models.stored_arguments import StoredArguments

_SAME = {
    "layers": "num_layers",
    "hidden": "hidden_size",
    "ffn": "ffn_hidden_size",
    "heads": "num_attention_heads",
    "norm_eps": "layernorm_epsilon",
    "qk_norm": "qk_layernorm",
    "qkv_bias": "add_qkv_bias",
    "zero_centered_norms": "layernorm_zero_centered_gamma",
}
_GROUPED_QUERY = {
    "groups": "num_query_groups",
    "head": "kv_channels",
    "output_gate": "attention_output_gate",
}
_LATENT = {
    "q_lora": "q_lora_rank",
    "kv_lora": "kv_lora_rank",
    "nope": "qk_head_dim",
    "rotated": "qk_pos_emb_head_dim",
    "value": "v_head_dim",
}
_EXPERTS = {
    "experts": "num_moe_experts",
    "experts_per_token": "moe_router_topk",
    "expert_ffn": "moe_ffn_hidden_size",
    "router_score": "moe_router_score_function",
    "router_bias": "moe_router_enable_expert_bias",
    "routing_scale": "moe_router_topk_scaling_factor",
    "shared_gate": "moe_shared_expert_gate",
}
"""Attribute of ``Model`` → argument of ``TransformerConfig`` with the same value."""


@dataclass(frozen=True, slots=True)
class MegatronArguments:
    """Megatron-Core's arguments for a model.

    Attributes:
        config: arguments of ``MLATransformerConfig`` for latent attention, otherwise of ``TransformerConfig``.
        attributes: to be set on the configuration afterwards: ``GPTModel`` reads YaRN's settings from attributes that
            the class does not declare.
        gpt: arguments of ``GPTModel``.
    """

    config: dict[str, Any]
    attributes: dict[str, Any]
    gpt: dict[str, Any]


def megatron_arguments(model: Model) -> MegatronArguments:
    """Arguments for a model, except parallelism, precision and multi-token prediction.

    Raises:
        UserError: Megatron-Core does not support the model.
    """
    config: dict[str, Any] = {to: getattr(model, name) for name, to in _SAME.items()}
    config |= {"normalization": "RMSNorm", "gated_linear_unit": True, "add_bias_linear": False}
    config |= {"hidden_dropout": 0.0, "attention_dropout": 0.0, "multi_latent_attention": model.latent}
    if model.latent:
        config |= {to: getattr(model, name) for name, to in _LATENT.items()}
        config["num_query_groups"] = model.heads
    else:
        config |= {to: getattr(model, name) for name, to in _GROUPED_QUERY.items()}
    if model.mixer is not None:
        config |= {"experimental_attention_variant": model.mixer.variant, **model.mixer.megatron()}
    if model.experts:
        config |= _experts(model)
    gpt: dict[str, Any] = {
        "share_embeddings_and_output_weights": model.tied,
        "position_embedding_type": "rope",
        "rotary_base": model.rope.theta,
        "rotary_percent": model.rotary_fraction,
    }
    if model.latent:
        return MegatronArguments(config | _latent_rope(model.rope), {}, gpt)
    attributes, more = _grouped_query_rope(model.rope, model.rotary_fraction)
    return MegatronArguments(config, attributes, gpt | more)


def _experts(model: Model) -> dict[str, Any]:
    grouped = model.expert_groups > 1
    # Megatron ranks a group by the sum of its top k // top_groups scores, the published models by its top two.
    if grouped and model.experts_per_token // model.top_groups != 2:
        raise UserError(
            f"config.json: num_experts_per_tok={model.experts_per_token} with topk_group={model.top_groups} is routed "
            f"differently by Megatron-Core, which needs two experts per group; this model cannot be used with it."
        )
    if model.router_score == "sigmoid" and model.experts_per_token == 1:
        raise UserError(
            "config.json: num_experts_per_tok=1 with a sigmoid router: Megatron-Core does not normalise its score; "
            "this model cannot be used with it."
        )
    return {to: getattr(model, name) for name, to in _EXPERTS.items()} | {
        "moe_layer_freq": 1 if model.uniform else [int(x) for x in model.moe_layers],
        "moe_shared_expert_intermediate_size": model.shared_ffn or None,
        "moe_router_pre_softmax": model.router_score == "sigmoid" or not model.renormalise,
        "moe_router_num_groups": model.expert_groups if grouped else None,
        "moe_router_group_topk": model.top_groups if grouped else None,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        # Reinforcement learning freezes the load-balancing biases of the trained model.
        "moe_router_bias_update_rate": 0.0,
    }


def _latent_rope(rope: Rope) -> dict[str, Any]:
    if rope.kind == "llama3":
        raise UserError("config.json: RoPE of type 'llama3' with latent attention is not supported by Megatron-Core.")
    yarn = rope.kind == "yarn"
    out: dict[str, Any] = {
        "rope_type": "yarn" if yarn else "rope",
        "rotary_base": rope.theta,
        "rotary_scaling_factor": rope.factor,
    }
    if yarn:
        out |= {"original_max_position_embeddings": rope.original_context}
        out |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow}
        # Absent values mean no scale on the logits and YaRN's own temperature.
        out |= {"mscale": 1.0 if rope.mscale is None else rope.mscale, "mscale_all_dim": rope.mscale_all_dim or 0.0}
    return out


def _grouped_query_rope(rope: Rope, fraction: float) -> tuple[dict[str, Any], dict[str, Any]]:
    if rope.kind == "yarn":
        if fraction != 1.0:
            raise UserError(
                f"config.json: partial_rotary_factor={fraction} with YaRN is not supported by Megatron-Core; this "
                f"model cannot be used with it."
            )
        return {
            "yarn_rotary_scaling_factor": rope.factor,
            "yarn_original_max_position_embeddings": rope.original_context,
            "yarn_beta_fast": rope.beta_fast,
            "yarn_beta_slow": rope.beta_slow,
            "yarn_mscale": rope.mscale,
            "yarn_mscale_all_dim": rope.mscale_all_dim,
            "yarn_correction_range_round_to_int": True,
        }, {"position_embedding_type": "yarn"}
    if rope.kind == "llama3":
        bands = (rope.original_context, rope.low_freq_factor, rope.high_freq_factor)
        if bands != (8192, 1.0, 4.0):
            raise UserError(
                f"config.json: RoPE of type 'llama3' with original_max_position_embeddings, low_freq_factor and "
                f"high_freq_factor = {bands}: Megatron-Core knows only (8192, 1, 4)."
            )
        return {}, {"rope_scaling": True, "rope_scaling_factor": rope.factor}
    return {}, {}


_ONLY: dict[str, Any] = {
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
}
"""Megatron-LM arguments that affect the computation, and their one supported value."""
_OFF = (
    *("rotary_interleaved", "squared_relu", "qk_l2_norm", "window_size", "no_rope_freq", "glu_linear_offset"),
    *("activation_func_clamp_value", "apply_residual_connection_post_layernorm", "is_hybrid_model", "moe_latent_size"),
    *("moe_apply_probs_on_input",),
    *("heterogeneous_layers_config_path", "heterogeneous_layers_config_encoded_json"),
)
"""Further such arguments, which must be absent or off."""


_OLDER = {"layernorm_epsilon": "norm_epsilon"}
"""Earlier names of arguments."""


def _typed(model: Model) -> Model:
    """Check that the values of ``model`` have their declared types; return it."""
    owners: list[Any] = [model, model.rope, *([] if model.mixer is None else [model.mixer])]
    for owner in owners:
        hints = get_type_hints(type(owner))
        for field in fields(owner):
            value, choices = getattr(owner, field.name), get_args(hints[field.name]) or (hints[field.name],)
            if field.name in ("rope", "mixer", "moe_layers", "pattern") or value in [
                c for c in choices if isinstance(c, str)
            ]:
                continue
            number = float in choices and type(value) is int
            if not (number or type(value) in choices) or (type(value) is float and not math.isfinite(value)):
                raise UserError(
                    f"the checkpoint's arguments say {field.name}={value!r}, which no known model has; give --template "
                    f"with the model's HF folder."
                )
    return model


def model_from_megatron(args: Mapping[str, Any]) -> Model:
    """Build a model from the arguments that Megatron-LM 0.16 to 0.19 stores in its checkpoints (``args``).

    Raises:
        UserError: an argument is missing or has the wrong type, or the model belongs to no supported family.
    """
    given = StoredArguments(args)
    for name, wanted in _ONLY.items():
        given.only(name, wanted)
    for name in _OFF:
        given.only(name, None, False)
    latent = bool(given.take("multi_latent_attention", False))
    names = _SAME | (_LATENT if latent else _GROUPED_QUERY)
    values: dict[str, Any] = {
        name: given.need(to, _OLDER.get(to, to))
        for name, to in names.items()
        if name not in ("groups", "q_lora", "output_gate", "zero_centered_norms")
    }
    if latent:
        values["q_lora"] = given.take("q_lora_rank")
    else:
        values["output_gate"] = given.take("attention_output_gate", False)
    older = given.take("apply_layernorm_1p", False)
    values["zero_centered_norms"] = given.take("layernorm_zero_centered_gamma", older)
    mixers = {family.mixer.variant: family.mixer for family in ARCHITECTURES.values() if family.mixer is not None}
    variant = given.only("experimental_attention_variant", None, False, *mixers)
    if variant:
        values["mixer"] = mixers[variant].from_megatron(given)
    if not latent:
        grouped = given.take("group_query_attention", False)
        values["groups"] = given.need("num_query_groups") if grouped else values["heads"]
    if given.take("num_experts"):
        values |= _experts_from_megatron(given)
    return _typed(
        Model(
            **values,
            vocab=given.need("vocab_size", "padded_vocab_size"),
            context=given.need("max_position_embeddings", "seq_length"),
            tied=not given.take("untie_embeddings_and_output_weights", False),
            rope=_rope_from_megatron(given, latent),
            rotary_fraction=given.take("rotary_percent", 1.0),
            mtp=given.take("mtp_num_layers", 0),
        )
    )


def _experts_from_megatron(given: StoredArguments) -> dict[str, Any]:
    pattern = given.pattern("moe_layer_freq", given.take("moe_layer_freq", 1), lambda i, n: i % n == 0)
    score = given.take("moe_router_score_function", "softmax")
    return {
        "experts": given.need("num_experts"),
        "experts_per_token": given.need("moe_router_topk"),
        "expert_ffn": given.need("moe_ffn_hidden_size", "ffn_hidden_size"),
        "shared_ffn": given.take("moe_shared_expert_intermediate_size", 0),
        "moe_layers": pattern,
        "router_score": score,
        "router_bias": given.take("moe_router_enable_expert_bias", False),
        "renormalise": score == "sigmoid" or not given.take("moe_router_pre_softmax", False),
        "routing_scale": given.take("moe_router_topk_scaling_factor", 1.0),
        "shared_gate": given.take("moe_shared_expert_gate", False),
        "expert_groups": given.take("moe_router_num_groups", 1),
        "top_groups": given.take("moe_router_group_topk", 1),
    }


def _rope_from_megatron(given: StoredArguments, latent: bool) -> Rope:
    theta = given.take("rotary_base", 10000)
    theta = float(theta) if isinstance(theta, int) else theta
    kind = given.only("position_embedding_type", "rope", "yarn")
    if latent and given.take("rope_type", "yarn") == "yarn":
        # Megatron-LM has no argument for these, so MLATransformerConfig's defaults apply.
        mscale, mscale_all_dim = given.take("mscale", 1.0), given.take("mscale_all_dim", 0.0)
        return Rope(
            theta,
            "yarn",
            factor=given.need("rotary_scaling_factor"),
            original_context=given.take("original_max_position_embeddings", 4096),
            beta_fast=given.take("beta_fast", 32.0),
            beta_slow=given.take("beta_slow", 1.0),
            mscale=mscale if mscale_all_dim else None,
            mscale_all_dim=mscale_all_dim or None,
        )
    if not latent and kind == "yarn":
        return Rope(
            theta,
            "yarn",
            factor=given.need("yarn_rotary_scaling_factor"),
            original_context=given.need("yarn_original_max_position_embeddings"),
            beta_fast=given.need("yarn_beta_fast"),
            beta_slow=given.need("yarn_beta_slow"),
            mscale=given.take("yarn_mscale"),
            mscale_all_dim=given.take("yarn_mscale_all_dim"),
        )
    if given.take("use_rope_scaling", False):
        return Rope(theta, "llama3", given.take("rope_scaling_factor", 8.0), 8192)
    return Rope(theta)

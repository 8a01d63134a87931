"""Translation between ``config.json`` and `model.Model`, for the config formats of transformers 4 and 5.

Reads the raw file instead of using ``transformers``, whose classes rename fields, drop some and fill in defaults. Every
field is accounted for: translated, checked to have its one supported value, or known to have no effect, by its name
or by its kind (`fields.has_no_effect`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, get_type_hints

from megatron_fleet.config.errors import UserError
from megatron_fleet.models.architecture import Architecture
from megatron_fleet.models.fields import Fields, of_kind, same
from megatron_fleet.models.model import Model, Rope
from megatron_fleet.models.registry import ARCHITECTURES

_KINDS = get_type_hints(Model)
_ROPE_FIELDS = {
    "factor": "factor",
    "original_max_position_embeddings": "original_context",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "mscale": "mscale",
    "mscale_all_dim": "mscale_all_dim",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
}
"""Field of ``rope_scaling`` or ``rope_parameters`` → attribute of ``Rope``."""

_YARN_OPTIONAL = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")
_ROPE_NEEDS = {
    "default": (),
    "yarn": ("factor", "original_max_position_embeddings"),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
}
_ROPE_READ_ELSEWHERE = ("type", "rope_type", "rope_theta", "partial_rotary_factor")
_ROPE_WITHOUT_EFFECT = ("mrope_section", "mrope_interleaved")
"""They separate the axes of an image, which have equal positions in text."""

_MOST_EXPERTS = 200_000
"""Upper bound of the experts of all layers together."""

QUANTIZATION = ("quantization_config", "compression_config")
"""Fields of ``config.json``, or of its ``text_config``, that say that weights are stored quantised."""

HARMLESS = frozenset(
    [
        # Metadata about the file.
        *("architectures", "auto_map", "dtype", "model_type", "torch_dtype"),
        # Storage of the weights, handled by their reader.
        *QUANTIZATION,
        # Generation settings.
        *("prefix", "bad_words_ids", "begin_suppress_tokens", "suppress_tokens"),
        *("max_length", "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups"),
        *("temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty", "diversity_penalty"),
        *("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty"),
        *("num_return_sequences", "remove_invalid_values", "return_dict_in_generate", "use_cache"),
        # Training settings: initialisation, auxiliary losses.
        *("initializer_range", "aux_loss_alpha", "seq_aux"),
        *("output_router_logits", "pretraining_tp", "ep_size"),
        # Heads and outputs that a causal language model does not have.
        *("finetuning_task", "id2label", "label2id", "num_labels", "problem_type", "task_specific_params"),
        *("output_attentions", "output_hidden_states", "output_scores", "return_dict", "is_decoder"),
        *("is_encoder_decoder", "add_cross_attention", "cross_attention_hidden_size", "tie_encoder_decoder"),
        *("tokenizer_class", "chunk_size_feed_forward", "pruned_heads", "tf_legacy_loss", "torchscript"),
        *("use_bfloat16",),
    ]
)
"""``config.json`` fields of any model that do not affect the computation, besides those of `has_no_effect`."""


def is_quantized(config: Mapping[str, Any]) -> bool:
    """Return whether a config.json says that the folder's weights are stored quantised."""
    return bool(declared_quantization(config))


def declared_quantization(config: Mapping[str, Any]) -> list[Any]:
    """Return what a config.json says of quantised weights: the values of those of `QUANTIZATION` that are set."""
    return [part[key] for part in _parts(config) for key in QUANTIZATION if part.get(key)]


def drop_quantization(config: dict[str, Any]) -> None:
    """Remove from a config.json what says that weights are stored quantised, in place."""
    for part in _parts(config):
        for key in QUANTIZATION:
            part.pop(key, None)


def _parts(config: Mapping[str, Any]) -> tuple[Any, ...]:
    text = config.get("text_config")
    return (config, text) if isinstance(text, Mapping) else (config,)


def architecture_of(raw: Mapping[str, Any]) -> Architecture:
    """Family of a raw ``config.json``. Raises UserError if it is unknown."""
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise UserError(
            f"config.json: model_type={model_type!r} is not supported; use one of {known}, or a family of your own "
            f"(model.family)."
        )
    return ARCHITECTURES[model_type]


def read_model(raw: Mapping[str, Any]) -> Model:
    """Read the language model's architecture from a raw ``config.json``.

    Raises:
        UserError: the family or the value of a field is not supported, a field is missing, or a field is unknown, so
            that its effect is unknown too.
    """
    architecture = architecture_of(raw)
    fields = Fields(text_config(raw, architecture), _KINDS)
    values: dict[str, Any] = dict(architecture.given)
    for field in architecture.fields:
        values[field.to] = fields.take(field)
    for name, value in architecture.fixed.items():
        fields.check(name, value)
    # The language model's section of a file may repeat this top-level field.
    tied = same("tie_word_embeddings", [raw.get("tie_word_embeddings"), fields.optional("tie_word_embeddings")])
    values["tied"] = of_kind("tie_word_embeddings", False if tied is None else tied, bool)
    values["rope"], values["rotary_fraction"] = _rope(fields, architecture)
    _read_heads(values)
    if architecture.mixer is not None:
        values["mixer"] = architecture.mixer.read(fields, values["layers"])
    if architecture.experts is not None:
        values["moe_layers"] = architecture.experts.read(fields, values)
        _check_experts(values)
    fields.refuse_rest({*architecture.ignored, *HARMLESS})
    if architecture.text:
        known = {*architecture.ignored, *HARMLESS, architecture.text, "tie_word_embeddings"}
        Fields(raw, _KINDS).refuse_rest(known)
    return Model(**values)


def text_config(raw: Mapping[str, Any], architecture: Architecture) -> Mapping[str, Any]:
    """Language model section of a raw ``config.json``."""
    if architecture.text is None:
        return raw
    text = raw.get(architecture.text)
    if not isinstance(text, Mapping):
        raise UserError(
            f"config.json: {architecture.text} is missing; use the config.json that belongs to the weights."
        )
    return text


def _rope(fields: Fields, architecture: Architecture) -> tuple[Rope, float]:
    """The rotary embedding, and the fraction of a head that it rotates."""
    old, new = fields.part("rope_scaling"), fields.part("rope_parameters")
    raw: Mapping[str, Any] = same("rope_scaling or rope_parameters", [old or None, new or None]) or {}
    theta = same("rope_theta", [raw.get("rope_theta"), fields.optional("rope_theta")])
    if theta is None:
        raise UserError("config.json: neither rope_theta nor rope_parameters.rope_theta is there; add the RoPE base.")
    theta = of_kind("rope_theta", theta, float)
    kind: Any = same("rope_type or type", [raw.get("rope_type"), raw.get("type")]) or "default"
    if kind not in tuple(_ROPE_NEEDS):
        raise UserError(
            f"config.json: RoPE of type {kind!r} is not supported; use one of {', '.join(_ROPE_NEEDS)}, or remove "
            f"rope_scaling and stay within the model's native context."
        )
    for name in _ROPE_NEEDS[kind]:
        if raw.get(name) is None:
            raise UserError(f"config.json: RoPE of type {kind!r} needs {name} in rope_scaling; add it.")
    known = (*_ROPE_NEEDS[kind], *(_YARN_OPTIONAL if kind == "yarn" else ()))
    rest = {*raw} - {*known, *_ROPE_READ_ELSEWHERE, *_ROPE_WITHOUT_EFFECT}
    unknown = sorted(name for name in rest if raw[name] is not None)
    if unknown:
        raise UserError(
            f"config.json: {unknown[0]}={raw[unknown[0]]!r} in rope_scaling is not supported for RoPE of type "
            f"{kind!r}; remove it if it has no effect."
        )
    values = {_ROPE_FIELDS[name]: _rope_value(name, raw[name]) for name in known if raw.get(name) is not None}
    values = {name: value for name, value in values.items() if value}
    if ("mscale" in values) != ("mscale_all_dim" in values):
        raise UserError(
            "config.json: rope_scaling has only one of mscale and mscale_all_dim, which programs read differently; "
            "give both or neither."
        )
    return Rope(theta, kind, **values), _rotary_fraction(fields, raw, architecture)


def _rope_value(name: str, value: Any) -> Any:
    if name == "original_max_position_embeddings":
        return of_kind(name, value, int, 1)
    # 0 means the same as absence.
    return 0.0 if name.startswith("mscale") and value == 0 else of_kind(name, value, float)


def _rotary_fraction(fields: Fields, rope: Mapping[str, Any], architecture: Architecture) -> float:
    name = "partial_rotary_factor"
    value = same(name, [rope.get(name), fields.optional(name)])
    if value is None and architecture.partial_rotary:
        raise UserError(f"config.json: {name} is missing; use the config.json that belongs to the weights.")
    fraction: float = 1.0 if value is None else of_kind(name, value, float)
    if fraction > 1 or (fraction != 1 and not architecture.partial_rotary):
        raise UserError(
            f"config.json: {name}={value!r} is not supported for model_type={architecture.model_types[0]!r}; correct "
            f"the file."
        )
    return fraction


def _read_heads(values: dict[str, Any]) -> None:
    """Fill in grouped-query defaults that depend on other fields, and check the heads."""
    if "kv_lora" in values:
        return
    values["groups"] = values["groups"] or values["heads"]
    if values["head"] is None:
        if values["hidden"] % values["heads"]:
            raise UserError(
                f"config.json: num_attention_heads={values['heads']} does not divide hidden_size={values['hidden']} "
                f"and head_dim is missing; correct the file."
            )
        values["head"] = values["hidden"] // values["heads"]
    if values["heads"] % values["groups"]:
        raise UserError(
            f"config.json: num_key_value_heads={values['groups']} does not divide num_attention_heads="
            f"{values['heads']}; correct the file."
        )


def _check_experts(values: Mapping[str, Any]) -> None:
    """Check the number of experts and the routing."""
    layers = values["layers"]
    if not any(values["moe_layers"]):
        raise UserError(f"config.json: none of the {layers} layers has experts; use the config.json of the weights.")
    experts, chosen = values["experts"], values["experts_per_token"]
    if experts * layers > _MOST_EXPERTS:
        raise UserError(
            f"config.json: {layers} layers of {experts} experts are {experts * layers} experts, at most "
            f"{_MOST_EXPERTS} are supported; correct the file."
        )
    groups, top = values.get("expert_groups", 1), values.get("top_groups", 1)
    if experts % groups:
        raise UserError(f"config.json: n_group={groups} does not divide the {experts} experts; correct the file.")
    if top > groups:
        raise UserError(f"config.json: topk_group={top} is more than n_group={groups}; correct the file.")
    if chosen > experts // groups * top:
        raise UserError(
            f"config.json: num_experts_per_tok={chosen} is more than the {experts // groups * top} experts that a "
            f"token may choose from; correct the file."
        )


def write_config(model: Model, architecture: Architecture, dtype: str) -> dict[str, Any]:
    """Write the ``config.json`` of a language model in the format of transformers 4, which both versions read.

    Args:
        dtype: dtype of the weights, such as ``bfloat16``.

    Raises:
        ValueError: the family cannot express the model.
    """
    family = architecture.model_types[0]
    if any(model.moe_layers) != (architecture.experts is not None):
        raise ValueError(f"a model of type {family} cannot have {model.experts} experts")
    own = {field.name: getattr(model, field.to) for field in architecture.fields}
    own |= {
        name: value[0] if isinstance(value, tuple) else value
        for name, value in architecture.fixed.items()
        if not isinstance(value, list)
    }
    own |= _write_rope(model, architecture)
    if architecture.experts is not None:
        own |= architecture.experts.write(model)
    if architecture.mixer is not None and model.mixer is not None:
        own |= model.mixer.write()
    if model.latent:
        own["num_key_value_heads"] = model.heads
    raw: dict[str, Any] = {"model_type": family, "torch_dtype": dtype, "tie_word_embeddings": model.tied}
    raw |= {architecture.text: own} if architecture.text else own
    written = read_model(raw)
    # A size of dense layers that there are none of does not matter.
    ignored = "ffn" if model.moe_layers and all(model.moe_layers) else None
    lost = [
        field.name
        for field in dataclasses.fields(Model)
        if field.name != ignored and getattr(written, field.name) != getattr(model, field.name)
    ]
    if lost:
        raise ValueError(f"a model of type {family} cannot have {lost[0]}={getattr(model, lost[0])!r}")
    return raw


def _write_rope(model: Model, architecture: Architecture) -> dict[str, Any]:
    out: dict[str, Any] = {"rope_theta": model.rope.theta}
    if architecture.partial_rotary:
        out["partial_rotary_factor"] = model.rotary_fraction
    if model.rope.kind == "default":
        return {**out, "rope_scaling": None}
    names = (*_ROPE_NEEDS[model.rope.kind], *(_YARN_OPTIONAL if model.rope.kind == "yarn" else ()))
    scaling = {name: getattr(model.rope, _ROPE_FIELDS[name]) for name in names}
    kept = {name: value for name, value in scaling.items() if value is not None}
    return {**out, "rope_scaling": {"rope_type": model.rope.kind, "type": model.rope.kind, **kept}}

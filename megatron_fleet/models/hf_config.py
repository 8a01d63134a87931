"""Translation between ``config.json`` and `model.Model`, for the config formats of transformers 4 and 5.

Reads the raw file instead of using ``transformers``, whose classes rename fields, drop some and fill in defaults. Every
field is accounted for: translated, checked to have its one supported value, or known to have no effect.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable, Mapping
from typing import Any, get_type_hints

from megatron_fleet.config.errors import UserError
from megatron_fleet.models.fields import HARMLESS
from megatron_fleet.models.model import Model, Rope
from megatron_fleet.models.registry import ARCHITECTURES
from megatron_fleet.models.rules import REQUIRED, Architecture, Field

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

_TYPES = get_type_hints(Model)

_MOST = {"layers": 1000, "heads": 1 << 16, "groups": 1 << 16, "experts": 1 << 16, "mtp": 9}
_MOST |= {"linear_key_heads": 1 << 16, "linear_value_heads": 1 << 16, "linear_convolution": 1 << 10}
_MOST_OTHERWISE = (1 << 31) - 1
"""Default upper bound of an integer, beyond any model's: tables are sized by some, and sizes are multiplied."""
_MOST_EXPERTS = 200_000
"""Upper bound of the experts of all layers together."""


def architecture_of(raw: Mapping[str, Any]) -> Architecture:
    """Family of a raw ``config.json``. Raises UserError if it is unknown."""
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise UserError(f"config.json: model_type={model_type!r} is not supported; use one of {known}.")
    return ARCHITECTURES[model_type]


def read_model(raw: Mapping[str, Any]) -> Model:
    """Read the language model's architecture from a raw ``config.json``.

    Raises:
        UserError: the family or the value of a field is not supported, a field is missing, or a field is unknown, so
            that its effect is unknown too.
    """
    architecture = architecture_of(raw)
    fields = _Fields(text_config(raw, architecture))
    values: dict[str, Any] = dict(architecture.given)
    for field in architecture.fields:
        values[field.to] = fields.take(field)
    for name, value in architecture.fixed.items():
        fields.check(name, value)
    # The language model's section of a file may repeat this top-level field.
    tied = _same("tie_word_embeddings", [raw.get("tie_word_embeddings"), fields.optional("tie_word_embeddings")])
    values["tied"] = _of_kind("tie_word_embeddings", False if tied is None else tied, bool)
    values["rope"], values["rotary_fraction"] = _rope(fields, architecture)
    _read_heads(values)
    if architecture.hybrid:
        _read_linear(fields, values)
    _read_experts(fields, architecture, values)
    fields.refuse_rest({*architecture.ignored, *HARMLESS})
    if architecture.text:
        known = {*architecture.ignored, *HARMLESS, architecture.text, "tie_word_embeddings"}
        _Fields(raw).refuse_rest(known)
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


def _same(name: str, values: Iterable[Any]) -> Any:
    """The single value of a field that may appear in several places; ``None`` if it appears in none."""
    found = [value for value in values if value is not None]
    if any(value != found[0] for value in found[1:]):
        raise UserError(f"config.json: {name} is there several times with different values {found}; correct the file.")
    return found[0] if found else None


def _of_kind(name: str, value: Any, kind: type, least: float = 0, most: int = _MOST_OTHERWISE) -> Any:
    """Check that ``value`` is of a kind (bool; int from ``least`` to ``most``; float above ``least``); return it."""
    if kind is bool and isinstance(value, bool):
        return value
    if kind is float and type(value) in (int, float) and least < value <= sys.float_info.max:
        return float(value)
    if kind is int and type(value) is int and least <= value <= most:
        return value
    wanted = {bool: "true or false", int: f"an integer from {least} to {most}", float: f"a number above {least}"}[kind]
    raise UserError(f"config.json: {name}={value!r} is not supported, only {wanted}; correct the file.")


class _Fields:
    """The fields of a file; tracks which ones were read."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self._raw, self._seen = raw, set[str]()

    def optional(self, name: str, default: Any = None) -> Any:
        self._seen.add(name)
        value = self._raw.get(name)
        return default if value is None else value

    def part(self, name: str) -> Mapping[str, Any]:
        value = self.optional(name, {})
        if not isinstance(value, Mapping):
            raise UserError(f"config.json: {name}={value!r} is no JSON object; correct the file.")
        return value

    def integer(self, name: str, least: int, default: Any = REQUIRED) -> int:
        value: int = _of_kind(name, self._required(name, self.optional(name, default)), int, least)
        return value

    def take(self, field: Field) -> Any:
        value = _same(" or ".join((field.name, *field.also)), map(self.optional, (field.name, *field.also)))
        value = self._required(field.name, field.default if value is None else value)
        kind = _TYPES[field.to]
        if value is None or kind in (bool, float):
            return value if value is None else _of_kind(field.name, value, kind)
        most = _MOST.get(field.to, _MOST_OTHERWISE) if field.most is None else field.most
        return _of_kind(field.name, value, int, 0 if field.to == "mtp" else 1, most)

    def check(self, name: str, expected: Any) -> None:
        """Check a field's value.

        A list as ``expected`` means a list field whose items all have that value, a tuple several supported values.
        """
        choices = expected if isinstance(expected, tuple) else (expected,)
        value = self.optional(name, choices[0])
        each = isinstance(expected, list) and isinstance(value, list) and all(item in expected for item in value)
        if value not in choices and not each:
            raise UserError(
                f"config.json: {name}={value!r} is not supported for model_type={self._raw.get('model_type')!r}, only "
                f"{' or '.join(map(repr, choices))}; use a model without it."
            )

    def refuse_rest(self, harmless: set[str]) -> None:
        rest = sorted(set(self._raw) - self._seen - harmless)
        if rest:
            raise UserError(
                f"config.json: {rest[0]}={self._raw[rest[0]]!r} is an unknown field and may change what the model "
                f"computes; remove it from the file if it does not."
            )

    @staticmethod
    def _required(name: str, value: Any) -> Any:
        if value is REQUIRED:
            raise UserError(f"config.json: {name} is missing; use the config.json that belongs to the weights.")
        return value


def _rope(fields: _Fields, architecture: Architecture) -> tuple[Rope, float]:
    """The rotary embedding, and the fraction of a head that it rotates."""
    old, new = fields.part("rope_scaling"), fields.part("rope_parameters")
    raw: Mapping[str, Any] = _same("rope_scaling or rope_parameters", [old or None, new or None]) or {}
    theta = _same("rope_theta", [raw.get("rope_theta"), fields.optional("rope_theta")])
    if theta is None:
        raise UserError("config.json: neither rope_theta nor rope_parameters.rope_theta is there; add the RoPE base.")
    theta = _of_kind("rope_theta", theta, float)
    kind: Any = _same("rope_type or type", [raw.get("rope_type"), raw.get("type")]) or "default"
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
        return _of_kind(name, value, int, 1)
    # 0 means the same as absence.
    return 0.0 if name.startswith("mscale") and value == 0 else _of_kind(name, value, float)


def _rotary_fraction(fields: _Fields, rope: Mapping[str, Any], architecture: Architecture) -> float:
    name = "partial_rotary_factor"
    value = _same(name, [rope.get(name), fields.optional(name)])
    if value is None and architecture.partial_rotary:
        raise UserError(f"config.json: {name} is missing; use the config.json that belongs to the weights.")
    fraction: float = 1.0 if value is None else _of_kind(name, value, float)
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


def _read_linear(fields: _Fields, values: dict[str, Any]) -> None:
    """Read which layers are Gated DeltaNets, and check their heads."""
    layers, kinds = values["layers"], fields.optional("layer_types")
    interval = fields.optional("full_attention_interval")
    if interval is not None:
        every = _of_kind("full_attention_interval", interval, int, 1)
        counted = ["full_attention" if (i + 1) % every == 0 else "linear_attention" for i in range(layers)]
        if kinds not in (None, counted):
            raise UserError(
                f"config.json: full_attention_interval={interval} and layer_types={kinds!r:.200} name different "
                f"layers; correct the file."
            )
        kinds = counted
    if kinds is None:
        raise UserError("config.json: layer_types is missing; use the config.json that belongs to the weights.")
    known = ("linear_attention", "full_attention")
    if not isinstance(kinds, list) or len(kinds) != layers or not all(kind in known for kind in kinds):
        raise UserError(
            f"config.json: layer_types={kinds!r:.200} is not {' or '.join(known)} for each of the {layers} layers; "
            f"correct the file."
        )
    values["linear_layers"] = tuple(kind == "linear_attention" for kind in kinds)
    keys, heads = values["linear_key_heads"], values["linear_value_heads"]
    if heads % keys:
        raise UserError(
            f"config.json: linear_num_key_heads={keys} does not divide linear_num_value_heads={heads}; correct the "
            f"file."
        )


def _read_experts(fields: _Fields, architecture: Architecture, values: dict[str, Any]) -> None:
    """Read the layers with experts and the shared experts, and check the routing."""
    if architecture.moe == "none":
        return
    layers = values["layers"]
    if architecture.moe == "all":
        values["moe_layers"] = (True,) * layers
        # The family has no dense layers, so their size is arbitrary.
        values["ffn"] = values["expert_ffn"]
    elif architecture.moe == "first_dense":
        fields.check("moe_layer_freq", 1)
        values["moe_layers"] = _first_dense(fields, layers)
        values["shared_ffn"] = fields.integer("n_shared_experts", 0) * values["expert_ffn"]
    else:
        # transformers: layer i has experts if it is not in mlp_only_layers and i + 1 is a multiple of the step.
        step, without = fields.integer("decoder_sparse_step", 1, default=1), fields.optional("mlp_only_layers", [])
        if not isinstance(without, list):
            raise UserError(f"config.json: mlp_only_layers={without!r} is no list of layers; correct the file.")
        values["moe_layers"] = tuple(i not in without and (i + 1) % step == 0 for i in range(layers))
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


def _first_dense(fields: _Fields, layers: int) -> tuple[bool, ...]:
    """Whether each layer has experts: by the number of leading dense layers, by a list, or both."""
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
            f"config.json: first_k_dense_replace={dense} and mlp_layer_types={kinds!r} name different layers; correct "
            f"the file."
        )
    return counted


def write_config(model: Model, architecture: Architecture, dtype: str) -> dict[str, Any]:
    """Write the ``config.json`` of a language model in the format of transformers 4, which both versions read.

    Args:
        dtype: dtype of the weights, such as ``bfloat16``.

    Raises:
        ValueError: the family cannot express the model.
    """
    family = architecture.model_types[0]
    if any(model.moe_layers) != (architecture.moe != "none"):
        raise ValueError(f"a model of type {family} cannot have {model.experts} experts")
    own = {field.name: getattr(model, field.to) for field in architecture.fields}
    own |= {
        name: value[0] if isinstance(value, tuple) else value
        for name, value in architecture.fixed.items()
        if not isinstance(value, list)
    }
    own |= {**_write_rope(model, architecture), **_write_experts(model, architecture)}
    if architecture.hybrid:
        own["layer_types"] = ["linear_attention" if linear else "full_attention" for linear in model.linear_layers]
    if model.latent:
        own["num_key_value_heads"] = model.heads
    raw: dict[str, Any] = {"model_type": family, "torch_dtype": dtype, "tie_word_embeddings": model.tied}
    raw |= {architecture.text: own} if architecture.text else own
    written = read_model(raw)
    # A size of dense layers that there are none of does not matter.
    ignored = "ffn" if architecture.moe == "all" else None
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


def _write_experts(model: Model, architecture: Architecture) -> dict[str, Any]:
    if architecture.moe == "every_nth":
        dense = [i for i, experts in enumerate(model.moe_layers) if not experts]
        return {"decoder_sparse_step": 1, "mlp_only_layers": dense}
    if architecture.moe == "first_dense":
        shared = model.shared_ffn // model.expert_ffn
        return {"first_k_dense_replace": model.moe_layers.index(True), "moe_layer_freq": 1, "n_shared_experts": shared}
    return {}

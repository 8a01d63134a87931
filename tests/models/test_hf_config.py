"""``config.json`` → what the model computes: no field that matters passes unread, in any family or dialect."""

from __future__ import annotations

import copy
import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from published_configs import published
from tiny_configs import FAMILIES, raw_config

from megatron_fleet.config.errors import UserError
from megatron_fleet.models.fields import has_no_effect
from megatron_fleet.models.hf_config import HARMLESS, architecture_of, read_model, text_config, write_config
from megatron_fleet.models.model import Rope
from megatron_fleet.models.registry import ARCHITECTURES

PUBLISHED = published()
DIALECTS = ("v4", "v5")
EVERY = [(family, dialect) for family in FAMILIES for dialect in DIALECTS]
CLASS_DEFAULTS = {
    *("tie_word_embeddings", "head_dim", "q_lora_rank", "norm_topk_prob", "num_nextn_predict_layers", "rope_scaling"),
    *("decoder_sparse_step", "mlp_only_layers", "moe_layer_freq", "attention_bias", "use_qk_norm"),
    *("max_position_embeddings", "mlp_layer_types", "mtp_num_hidden_layers", "full_attention_interval"),
}
"""Fields that a file may lack although they matter."""
ROPE = ("rope_scaling", "rope_parameters")


def language(raw):
    return text_config(raw, architecture_of(raw))


def other(value):
    """A value of the same type that means something else."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return 2 * value + 2
    if isinstance(value, float):
        return 0.5 * value + 0.1
    if isinstance(value, str):
        return value + "_other"
    if isinstance(value, list):
        return [*value, 1]
    return {**(value or {}), "surprise": 1}


def outcome(raw):
    try:
        return read_model(raw)
    except UserError:
        return "refused"


def harmless_fields(raw):
    by_kind = {name for name in (*raw, *language(raw)) if has_no_effect(name, "a value")}
    return HARMLESS | set(architecture_of(raw).ignored) | by_kind


@pytest.mark.parametrize("family", FAMILIES)
def test_both_dialects_are_the_same_model(family):
    assert read_model(raw_config(family, "v4")) == read_model(raw_config(family, "v5"))


@pytest.mark.parametrize("raw", [*(raw_config(*each) for each in EVERY), *PUBLISHED.values()])
def test_what_is_written_reads_back(raw):
    model = read_model(raw)
    written = write_config(model, architecture_of(raw), "bfloat16")
    assert read_model(json.loads(json.dumps(written))) == model
    assert written["torch_dtype"] == "bfloat16"


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_are_accepted_whole(name):
    read_model(PUBLISHED[name])


@pytest.mark.parametrize(("family", "dialect"), EVERY)
def test_no_field_that_matters_passes_unread(family, dialect):
    raw = raw_config(family, dialect)
    model, harmless = read_model(raw), harmless_fields(raw)
    parts = [raw] if language(raw) is raw else [raw, language(raw)]
    for part in parts:
        for name in set(part) - {architecture_of(raw).text}:
            before = copy.deepcopy(part[name])
            part[name] = other(before)
            if name == "model_type" and part is raw:
                assert outcome(raw) == "refused"
            else:
                assert (outcome(raw) == model) == (name in harmless), name
            part[name] = before
    assert outcome(raw) == model


@pytest.mark.parametrize(("family", "dialect"), EVERY)
def test_no_rotary_setting_passes_unread(family, dialect):
    raw = raw_config(family, dialect)
    model, part = read_model(raw), language(raw)
    for at in ROPE:
        for name in part.get(at) or ():
            before = part[at][name]
            part[at][name] = other(before)
            assert (outcome(raw) == model) == name.startswith("mrope_"), (at, name)
            part[at][name] = before


@pytest.mark.parametrize(("family", "dialect"), EVERY)
def test_a_field_may_be_missing_only_where_absence_has_a_meaning(family, dialect):
    raw = raw_config(family, dialect)
    architecture, part = architecture_of(raw), language(raw)
    optional = CLASS_DEFAULTS | harmless_fields(raw) | set(architecture.fixed)
    if family == "llama3":
        optional |= {"num_key_value_heads"}
    if family.startswith("glm4_flash"):
        optional |= {"partial_rotary_factor"} | ({"first_k_dense_replace"} if "mlp_layer_types" in part else set())
    if family.startswith("qwen3_5"):
        optional |= {"partial_rotary_factor"} | ({"layer_types"} if "full_attention_interval" in part else set())
    if family in ("qwen3", "qwen3_tied", "qwen3_yarn", "qwen3_vl") or family.startswith("qwen3_5"):
        optional -= {"head_dim"}
    for name in list(part):
        if name == "model_type":
            continue
        value = part.pop(name)
        missing = {"rope_parameters": "rope_theta", "num_local_experts": "num_experts"}.get(name, name)
        if name not in optional:
            with pytest.raises(UserError, match=rf"{missing}\b.*(is missing|is there)"):
                read_model(raw)
        else:
            read_model(raw)
        part[name] = value


@pytest.mark.parametrize(
    "family", ["qwen2", "qwen3", "qwen3_moe", "llama3", "deepseek_v3", "glm4_moe", "glm4_flash", "qwen3_5_text"]
)
def test_absence_means_what_it_means_to_transformers(family):
    transformers = pytest.importorskip("transformers")
    raw = raw_config(family, "v4")
    architecture = architecture_of(raw)
    # transformers computes neither prediction layers nor anything from the longest context; a rank that the tensors
    # contradict is refused later.
    beside = {"num_nextn_predict_layers", "q_lora_rank", "max_position_embeddings"}
    names = (CLASS_DEFAULTS | set(architecture.fixed)) - beside
    for name in names & set(raw):
        absent = {key: value for key, value in raw.items() if key != name}
        if name == "head_dim" and family in ("qwen3", "qwen3_5_text"):
            continue
        filled = json.loads(transformers.AutoConfig.for_model(**absent).to_json_string(use_diff=False))
        own = {name for field in architecture.fields for name in (field.name, *field.also)}
        own |= CLASS_DEFAULTS | set(architecture.fixed) | {"first_k_dense_replace", "n_shared_experts"}
        if (mixer := read_model(raw).mixer) is not None:
            own |= mixer.write().keys()
        theirs = {key: value for key, value in filled.items() if key in own | {"model_type", "rope_parameters"}}
        if family == "deepseek_v3":
            del theirs["head_dim"]
        assert read_model(absent) == read_model(theirs), name


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_other_values_of_fixed_fields_are_refused_by_name(model_type):
    family = {"llama": "llama3", "glm4_moe_lite": "glm4_flash"}.get(model_type, model_type)
    for name, value in ARCHITECTURES[model_type].fixed.items():
        raw = raw_config(family, "v4")
        language(raw)[name] = other(value[0] if isinstance(value, tuple) else value)
        with pytest.raises(UserError, match=f"{name}="):
            read_model(raw)


@pytest.mark.parametrize("family", FAMILIES)
def test_unknown_fields_are_refused_by_name(family):
    raw = raw_config(family, "v4")
    text = ARCHITECTURES[raw["model_type"]].text
    at = next(name for name in ROPE if name in language(raw))
    rope = {at: (language(raw)[at] or {}) | {"attention_factor": 1.5}}
    for change in ({"surprise": 1}, {"n_hash_layers": 2}, rope):
        name = "attention_factor" if change is rope else next(iter(change))
        changed = raw | ({text: raw[text] | change} if text else change)
        with pytest.raises(UserError, match=f"{name}="):
            read_model(changed)
    if text:
        with pytest.raises(UserError, match="hidden_size=4"):
            read_model(raw | {"hidden_size": 4})


WRITERS = {
    "unsloth_fixed": True,
    "unsloth_version": "2026.4.5",
    "mergekit_version": "0.1.3",
    "llamafactory_stage": "sft",
    "_name_or_path": "/models/base",
    "_commit_hash": "f00d",
    "_experts_implementation": "grouped_mm",
    "think_start_token_id": 7,
    "image_token_index": 9,
    "tokenizer_padding_side": "left",
    "hidden_dropout": 0.1,
    "classifier_dropout": None,
    "attn_pdrop": 0.0,
    "router_z_loss_coef": 0.001,
    "gradient_checkpointing": False,
    "an_unknown_object": {},
    "an_unknown_list": [],
    "an_unknown_value": None,
}
"""Fields as tools write them, and fields without a value."""


@pytest.mark.parametrize("family", FAMILIES)
def test_fields_of_other_writers_change_nothing(family):
    raw = raw_config(family, "v4")
    text = ARCHITECTURES[raw["model_type"]].text
    assert read_model(raw | WRITERS) == read_model(raw)
    if text:
        assert read_model(raw | {text: raw[text] | WRITERS}) == read_model(raw)


@pytest.mark.parametrize("name", ["version_scale", "unsloth", "dropout_free_window", "token_id_scale", "loss_free"])
def test_names_that_resemble_a_kind_are_refused(name):
    with pytest.raises(UserError, match=f"{name}=2.0 is an unknown field"):
        read_model(raw_config("qwen3", "v4") | {name: 2.0})


@pytest.mark.parametrize(
    ("name", "rope"),
    [
        ("Kimi-K2-Instruct", Rope(50000.0, "yarn", 32.0, 4096, 1.0, 1.0, 1.0, 1.0)),
        ("Kimi-K2-Thinking", Rope(50000.0, "yarn", 64.0, 4096, 1.0, 1.0, 1.0, 1.0)),
        ("Kimi-K2.5", Rope(50000.0, "yarn", 64.0, 4096, 32.0, 1.0, 1.0, 1.0)),
        ("DeepSeek-V3", Rope(10000.0, "yarn", 40.0, 4096, 32.0, 1.0, 1.0, 1.0)),
        ("Moonlight-16B-A3B", Rope(50000.0)),
        ("Qwen3-8B", Rope(1000000.0)),
        ("Qwen3-VL-8B", Rope(5000000.0)),
        (
            "Llama-3.2-1B",
            Rope(500000.0, "llama3", 32.0, 8192, low_freq_factor=1.0, high_freq_factor=4.0),
        ),
    ],
)
def test_rotary_settings_of_published_models(name, rope):
    assert read_model(PUBLISHED[name]).rope == rope


def test_details_of_published_models():
    models = {name: read_model(raw) for name, raw in PUBLISHED.items()}
    assert [models[name].moe_layers.count(False) for name in ("DeepSeek-V3", "Kimi-K2.5", "Qwen3-30B-A3B")] == [3, 1, 0]
    v3, moonlight, glm = models["DeepSeek-V3"], models["Moonlight-16B-A3B"], models["GLM-4.5"]
    assert (v3.expert_groups, v3.top_groups, v3.mtp, v3.routing_scale) == (8, 4, 1, 2.5)
    assert (moonlight.q_lora, moonlight.shared_ffn, moonlight.mtp) == (None, 2816, 0)
    assert (glm.rotary_fraction, glm.qkv_bias, glm.qk_norm, glm.head) == (0.5, True, True, 128)
    assert not models["GLM-4.5-Air"].qk_norm and models["Qwen3-VL-4B"].tied and not models["Qwen3-VL-8B"].tied
    assert (models["Qwen2.5-7B"].head, models["Qwen2.5-7B"].qkv_bias, models["Qwen2.5-7B"].qk_norm) == (
        128,
        True,
        False,
    )
    assert models["Qwen3-30B-A3B"].renormalise and models["Qwen3-30B-A3B"].router_score == "softmax"


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("qwen3", {"model_type": "gpt_neox"}, "model_type='gpt_neox' is not supported; use one of .*qwen3"),
        ("qwen3", {"model_type": ["qwen3"]}, "model_type=.* is not supported"),
        ("qwen3", {"head_dim": None}, "head_dim is missing"),
        ("qwen2", {"hidden_size": 98}, "num_attention_heads=8 does not divide hidden_size=98"),
        ("qwen3", {"num_key_value_heads": 3}, "num_key_value_heads=3 does not divide num_attention_heads=8"),
        ("qwen3", {"rope_theta": None}, "add the RoPE base"),
        ("qwen3", {"rope_theta": "1e6"}, "rope_theta='1e6' is not supported"),
        ("qwen3", {"rms_norm_eps": math.nan}, "rms_norm_eps=nan"),
        ("qwen3", {"rms_norm_eps": 10**400}, "rms_norm_eps=1000"),
        ("qwen3", {"rms_norm_eps": 0}, "rms_norm_eps=0 .* a number above 0"),
        ("qwen3", {"num_hidden_layers": True}, "num_hidden_layers=True .* integer from 1"),
        ("qwen3", {"vocab_size": 0}, "vocab_size=0"),
        ("qwen3", {"tie_word_embeddings": "yes"}, "tie_word_embeddings='yes' .* true or false"),
        ("qwen3", {"layer_types": ["full_attention"] * 3 + ["sliding_attention"]}, "layer_types="),
        ("qwen3", {"hidden_act": ["silu"]}, "hidden_act="),
        ("qwen3", {"rope_scaling": {"rope_type": "longrope"}}, "RoPE of type 'longrope' .* native context"),
        ("qwen3", {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "needs original_max_position_embeddings"),
        ("qwen3", {"rope_scaling": YARN | {"type": "llama3"}}, "rope_type or type .* different values"),
        ("qwen3", {"rope_scaling": YARN | {"rope_theta": 5.0}}, "rope_theta .* different values"),
        ("qwen3", {"rope_scaling": YARN, "rope_parameters": YARN | {"factor": 2.0}}, "rope_parameters .* different"),
        ("qwen3", {"rope_scaling": YARN | {"truncate": False}}, "truncate=False in rope_scaling is not supported"),
        ("qwen3", {"rope_scaling": YARN | {"attention_factor": 1.2}}, "attention_factor=1.2"),
        ("qwen3", {"rope_scaling": YARN | {"low_freq_factor": 2.0}}, "low_freq_factor=2.0"),
        ("qwen3", {"rope_scaling": {"rope_type": "default", "factor": 4.0}}, "factor=4.0"),
        ("qwen3", {"rope_scaling": YARN | {"factor": "4"}}, "factor='4'"),
        ("qwen3", {"rope_scaling": 4}, "rope_scaling=4 is not a JSON object"),
        ("deepseek_v3", {"rope_scaling": YARN | {"mscale": 0.7}}, "only one of mscale and mscale_all_dim"),
        ("qwen3", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported .*'qwen3'"),
        ("glm4_moe", {"partial_rotary_factor": None}, "partial_rotary_factor is missing"),
        ("glm4_moe", {"partial_rotary_factor": 1.5}, "partial_rotary_factor=1.5"),
        (
            "glm4_moe",
            {"rope_scaling": {"type": "default", "partial_rotary_factor": 0.25}},
            "partial_rotary_factor .* diff",
        ),
        ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq=2"),
        ("deepseek_v3", {"moe_layer_freq": [1, 1, 1, 1]}, "moe_layer_freq="),
        ("deepseek_v3", {"first_k_dense_replace": 4}, "none of the 4 layers has experts"),
        ("deepseek_v3", {"first_k_dense_replace": -1}, "first_k_dense_replace=-1"),
        ("glm4_flash", {"mlp_layer_types": ["dense", "sparse"]}, "mlp_layer_types=.* each of the 4 layers"),
        ("glm4_flash", {"mlp_layer_types": ["sparse"] * 4}, "first_k_dense_replace=1 and mlp_layer_types="),
        ("deepseek_v3", {"n_group": 3}, "n_group=3 does not divide the 8 experts"),
        ("deepseek_v3", {"topk_group": 4}, "topk_group=4 is more than n_group=2"),
        ("deepseek_v3", {"num_experts_per_tok": 5}, "num_experts_per_tok=5 is more than the 4 experts"),
        ("deepseek_v3", {"norm_topk_prob": False}, "norm_topk_prob=False"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func='softmax'"),
        ("deepseek_v3", {"num_experts": 16}, "n_routed_experts .* different values"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step=0"),
        ("qwen3_moe", {"mlp_only_layers": 3}, "mlp_only_layers=3 is not a list"),
        ("qwen3_moe", {"mlp_only_layers": [0, 1, 2, 3]}, "none of the 4 layers has experts"),
        ("qwen3_moe", {"shared_expert_intermediate_size": 64}, "shared_expert_intermediate_size=64"),
        ("qwen3_5_text", {"layer_types": ["full_attention"] * 4}, "full_attention_interval=4 and layer_types="),
        ("qwen3_5_text", {"layer_types": None, "full_attention_interval": None}, "layer_types is missing"),
        ("qwen3_5_text", {"layer_types": ["x"] * 4, "full_attention_interval": None}, "layer_types=.* of the 4 layers"),
        ("qwen3_5_text", {"full_attention_interval": 0}, "full_attention_interval=0"),
        (
            "qwen3_5_text",
            {"linear_num_key_heads": 3},
            "linear_num_key_heads=3 does not divide linear_num_value_heads=4",
        ),
        ("qwen3_5_text", {"mtp_num_hidden_layers": 2}, "mtp_num_hidden_layers=2 .* from 0 to 1"),
        ("qwen3_5_text", {"output_gate_type": "sigmoid"}, "output_gate_type='sigmoid' .* 'swish' or 'silu'"),
        ("kimi_k25", {"text_config": None}, "text_config is missing"),
        ("kimi_k25", {"tie_word_embeddings": True}, "tie_word_embeddings .* different values"),
    ],
)
def test_refusals(family, change, message):
    with pytest.raises(UserError, match=message):
        read_model(raw_config(family, "v4") | change)


def test_expert_layers_by_a_list_alone():
    raw = raw_config("glm4_flash", "v4") | {"mlp_layer_types": ["dense", "sparse", "dense", "sparse"]}
    del raw["first_k_dense_replace"]
    assert read_model(raw).moe_layers == (False, True, False, True)


def test_absent_mscale_is_not_mscale_of_one():
    raw = raw_config("deepseek_v3", "v4") | {"rope_scaling": YARN}
    bare, zero, ones = (
        read_model(raw | {"rope_scaling": YARN | more}).rope
        for more in ({}, *({"mscale": m, "mscale_all_dim": m} for m in (0, 1.0)))
    )
    assert bare == zero and (bare.mscale, bare.mscale_all_dim) == (None, None)
    assert (ones.mscale, ones.mscale_all_dim) == (1.0, 1.0)


def test_sparse_steps_and_dense_layers_are_as_in_transformers():
    raw = raw_config("qwen3_moe", "v4") | {"num_hidden_layers": 7}
    model = read_model(raw | {"decoder_sparse_step": 2, "mlp_only_layers": [3]})
    assert model.moe_layers == (False, True, False, False, False, True, False)
    assert [model.has_experts(i) for i in range(7)] == list(model.moe_layers) and not model.uniform


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 600) | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=4,
)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_nothing_but_a_model_or_a_clear_refusal_comes_out(data):
    raw = raw_config(*data.draw(st.sampled_from(EVERY)))
    part = data.draw(st.sampled_from([raw, language(raw)]))
    for name in data.draw(st.lists(st.sampled_from(sorted(part)), min_size=1, max_size=3)):
        if name in ROPE and isinstance(part[name], dict) and part[name] and data.draw(st.booleans()):
            inner = data.draw(st.sampled_from(sorted(part[name])))
            part[name] = part[name] | {inner: data.draw(JSON_VALUES)}
        else:
            part[name] = data.draw(JSON_VALUES)
    try:
        read_model(raw)
    except UserError as e:
        assert str(e).startswith("config.json: ") and "\n" not in str(e)


@pytest.mark.parametrize(
    ("family", "into", "message"),
    [
        ("qwen3", "llama", "llama cannot have qk_norm=True"),
        ("deepseek_v3", "qwen3", "8 experts"),
        ("qwen3", "deepseek_v3", "0 experts"),
        ("deepseek_v3", "glm4_moe", "groups=None"),
        ("glm4_moe", "qwen3_moe", "qkv_bias=True"),
    ],
)
def test_a_family_that_cannot_express_a_model_says_so(family, into, message):
    with pytest.raises(ValueError, match=message):
        write_config(read_model(raw_config(family, "v4")), ARCHITECTURES[into], "bfloat16")


@pytest.mark.parametrize("family", ["qwen3_yarn", "llama3", "deepseek_v3", "moonlight", "glm4_moe", "glm4_flash"])
def test_transformers_computes_the_same_from_what_is_written(family, tmp_path):
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from tiny_models import make, reference_logits

    folder, ids = make(family, tmp_path), torch.arange(48).view(2, 24) * 7
    before = reference_logits(folder, ids)
    raw = json.loads((folder / "config.json").read_text())
    written = write_config(read_model(raw), architecture_of(raw), "bfloat16")
    # Which class of transformers to use is not the model's to know.
    (folder / "config.json").write_text(json.dumps(written | {"architectures": raw["architectures"]}))
    assert torch.equal(reference_logits(folder, ids), before)

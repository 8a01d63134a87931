"""Megatron's names for weights: the installed release has those written down, and the releases differ as we know."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import itertools
import json
import math
import re
import sys

import pytest
from recorded_names import VERSIONS, megatron_names

from megatron_fleet.config.errors import UserError

BASE = "0.16.1"
MLA, MTP = ("deepseek_v3", "moonlight"), ("deepseek_v3", "glm4_moe", "qwen3_5")
TE_VARIANTS = ("te", "te_grouped")


def number(version):
    return tuple(map(int, version.split(".")))


def folded(name):
    return re.sub(r"\.layers\.\d+\.", ".layers.N.", name)


def checkpoint(names):
    """Everything in a checkpoint: key → how it is stored."""
    return names.tensors | names.objects


def differences(one, other):
    """Entries that are in one of two mappings only, or differ."""
    return {key for key in one.keys() | other.keys() if one.get(key) != other.get(key)}


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("megatron"), reason="Megatron-Core is not installed")
def test_the_installed_release_is_the_one_written_down():
    version = importlib.metadata.version("megatron-core")
    assert version in VERSIONS, "run: python tools/megatron_names.py"
    text = megatron_names.enumerate_release(None)
    written, found = megatron_names.read(version), megatron_names.decode(text)
    assert found.keys() == written.keys()
    for at, names in found.items():
        assert names.failure == written[at].failure, at
        assert differences(names.weights, written[at].weights) == set(), at
        assert differences(checkpoint(names), checkpoint(written[at])) == set(), at
    assert text == (megatron_names.RECORDS / f"{version}.json").read_text(encoding="utf-8")


@pytest.mark.parametrize("version", VERSIONS)
def test_weights_and_checkpoint_account_for_each_other(version):
    for at, names in megatron_names.read(version).items():
        places = {}
        for name, weight in names.weights.items():
            tensor = names.tensors[weight.key]
            assert (weight.dtype, weight.shape) == (tensor.dtype, tensor.shape[len(weight.index) :]), (at, name)
            places.setdefault(weight.key, set()).add(weight.index)
            assert weight.kind == ("buffer" if name.endswith("expert_bias") else "parameter"), (at, name)
        assert places.keys() == names.tensors.keys(), at
        for key, indices in places.items():
            axes = names.tensors[key].shape[: len(next(iter(indices)))]
            assert indices == set(itertools.product(*map(range, axes))), (at, key)


@pytest.mark.parametrize("version", VERSIONS)
def test_every_axis_of_a_model_has_its_own_size(version):
    """Otherwise a transposed or exchanged tensor could have the right shape."""
    for at, names in megatron_names.read(version).items():
        sizes = {name: weight.shape for name, weight in names.weights.items() if len(weight.shape) == 2}
        square = {folded(name).rpartition("N.")[2] for name, (rows, columns) in sizes.items() if rows == columns}
        # Qwen2 has no head size of its own: all heads together are as wide as the layer.
        allowed = {"self_attention.linear_proj.weight"} if at[0] in ("qwen2", "llama3") else set()
        assert square == allowed, at


@pytest.mark.parametrize("version", VERSIONS)
def test_checkpoints_of_all_releases_are_alike_but_for(version):
    base, release = megatron_names.read(BASE), megatron_names.read(version)
    assert release.keys() == base.keys()
    for (model, variant), names in release.items():
        expected = set()
        if model in MTP and variant != "local" and number(version) >= (0, 17):
            expected = {"mtp.layers.N.transformer_layer.self_attention.core_attention._extra_state"}
        if model == "moonlight" and number(version) >= (0, 19):
            if variant == "local":
                assert "`q_lora_rank is None`" in names.failure
                continue
            # A norm before q that the model does not have.
            expected = {"decoder.layers.N.self_attention.linear_q_proj.layer_norm_weight"}
        assert names.failure is None
        found = differences(checkpoint(names), checkpoint(base[model, variant]))
        assert set(map(folded, found)) == expected, (model, variant)


@pytest.mark.parametrize("version", VERSIONS)
def test_in_memory_only_the_prediction_module_was_renamed(version):
    inner = "mtp_model_layer" if number(version) >= (0, 17) else "transformer_layer"
    for at, names in megatron_names.read(version).items():
        base = megatron_names.read(BASE)[at].weights
        renamed = {re.sub(r"^(mtp\.layers\.\d+)\.transformer_layer\.", rf"\1.{inner}.", k): v for k, v in base.items()}
        assert any(f".{inner}." in name for name in names.weights) == (at[0] in MTP)
        if not (at[0] == "moonlight" and number(version) >= (0, 19)):
            assert names.weights == renamed, at


@pytest.mark.parametrize("version", VERSIONS)
def test_grouped_and_single_experts_make_the_same_checkpoint(version):
    release = megatron_names.read(version)
    models = [model for model, variant in release if variant == "te_grouped"]
    assert len(models) == 6
    for model in models:
        assert checkpoint(release[model, "te"]) == checkpoint(release[model, "te_grouped"])


def other_name(key, model):
    """Name in Transformer Engine's layers of a tensor of the local layers' checkpoint."""
    expert_layer = ".layers.0." not in key or key.startswith("mtp.") or model.startswith("qwen3_moe")
    if model in MLA:
        key = re.sub(r"self_attention\.(q|kv)_layernorm\.", r"self_attention.linear_\1_up_proj.layer_norm_", key)
        return key if expert_layer else key.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
    if "moe" in model and expert_layer:
        return key.replace("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.")
    return key


@pytest.mark.parametrize("version", VERSIONS)
def test_layer_specifications_differ_in_the_names_and_dtypes_of_norms(version):
    release = megatron_names.read(version)
    for model in megatron_names.MODELS:
        local, te = release[model, "local"], release[model, "te"]
        if local.failure:
            continue
        renamed = {other_name(key, model): tensor for key, tensor in local.tensors.items()}
        assert renamed.keys() == te.tensors.keys(), model
        for key in differences(renamed, te.tensors):
            # Our Gated DeltaNet, which is the local one, keeps two more in float32.
            assert "norm" in key or key.endswith("A_log"), key
            assert renamed[key].dtype == "float32" and te.tensors[key].dtype == "bfloat16", key
            assert renamed[key].shape == te.tensors[key].shape, key


@pytest.mark.parametrize("version", VERSIONS)
def test_extra_states_belong_to_linears_and_with_transformer_engine_to_norms(version):
    for (model, variant), names in megatron_names.read(version).items():
        assert {objects.content for objects in names.objects.values()} <= {"None" if variant == "local" else "uint8[0]"}
        owners = {key.removesuffix("._extra_state") for key in names.objects if "core_attention" not in key}
        linears = {key for key, tensor in names.tensors.items() if len(tensor.shape) > 1 and ".conv1d." not in key}
        linears = {re.sub(r"\.weight(\.\w+)?$", "", key) for key in linears}
        linears -= {key for key in linears if key.endswith(("word_embeddings", "router", "norm", "output_layer"))}
        linears -= {key for key in linears if key.endswith(("layer_norm_weight", "gate_weight", "bias"))}
        norms = {key.removesuffix(".weight") for key in names.tensors if key.endswith("norm.weight")}
        assert owners == (linears | norms if variant != "local" else linears), (model, variant)


def test_object_keys_are_those_of_megatron():
    objects = megatron_names.Objects((2, 3), "None")
    keys = objects.keys("a._extra_state")
    assert len(keys) == math.prod(objects.grid) and keys[-1] == "a._extra_state/shard_1.2_2.3"
    assert megatron_names.Objects((1,), "None").keys("a") == ["a/shard_0_1"]


def test_a_strided_model_has_a_layer_axis_and_a_listed_one_has_layers_of_their_own():
    release = megatron_names.read(BASE)
    assert release["qwen3_moe", "te"].tensors["decoder.layers.mlp.router.weight"].shape == (3, 4, 48)
    assert release["qwen3_moe_listed", "te"].tensors["decoder.layers.2.mlp.router.weight"].shape == (4, 48)


def test_the_router_is_stored_like_other_weights_and_its_bias_in_float32():
    for version in VERSIONS:
        tensors = megatron_names.read(version)["deepseek_v3", "te"].tensors
        assert tensors["decoder.layers.1.mlp.router.weight"].dtype == "bfloat16"
        assert tensors["decoder.layers.1.mlp.router.expert_bias"].dtype == "float32"
        assert {key for key, tensor in tensors.items() if tensor.flexible} == {
            "embedding.word_embeddings.weight",
            "output_layer.weight",
        }


@pytest.mark.parametrize("version", VERSIONS)
def test_reading_and_writing_keeps_everything(version):
    text = (megatron_names.RECORDS / f"{version}.json").read_text(encoding="utf-8")
    assert json.loads(text)["megatron_core"] == version
    assert megatron_names.encode(version, megatron_names.decode(text)) == text


def test_a_folder_without_megatron_is_refused(tmp_path, monkeypatch, capsys):
    with pytest.raises(UserError, match="holds no megatron"):
        megatron_names.enumerate_release(tmp_path)
    monkeypatch.setattr(sys, "argv", ["megatron_names.py", "--source", str(tmp_path), "--out", str(tmp_path)])
    assert megatron_names.main() == 2
    assert capsys.readouterr().err.startswith(f"error: {tmp_path} ")
    assert not list(tmp_path.iterdir())


def test_what_fails_inside_is_told(tmp_path, monkeypatch):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho no such module\nexit 3\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(RuntimeError, match="local: exit status 3\nno such module"):
        megatron_names.enumerate_release(None)

"""Output of `inspect` for folders of all kinds."""

from __future__ import annotations

import json
import re

import pytest

torch = pytest.importorskip("torch")

from convert_helpers import megatron_tensors, write_foreign  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from tiny_models import stored_tensors  # noqa: E402

from megatron_fleet.convert.inspect import _checkpoint_rows  # noqa: E402
from megatron_fleet.weights.torch_dist.index import ChunkedTensor  # noqa: E402


def as_json(convert, *arguments):
    code, out, _ = convert("inspect", *arguments, "--json")
    assert code == 0
    return json.loads(out)


def rows_by_name(found, part="rows"):
    return {row["name"]: row for row in found[part]}


def test_an_hf_folder_by_kinds_and_by_tensors(made, convert):
    stored = stored_tensors(made("kimi_k25"))
    found = as_json(convert, made("kimi_k25"))
    assert (found["kind"], found["tensors"]) == ("hf", len(stored))
    assert found["nbytes"] == sum(t.nbytes for t in stored.values())
    rows = rows_by_name(found)
    packed = rows["language_model.model.layers.*.mlp.experts.*.gate_proj.weight_packed"]
    assert (packed["count"], packed["dtype"], packed["form"]) == (3 * 8, "I32", "INT4 codes")
    assert packed["nbytes"] == 3 * 8 * 64 * 96 // 2
    assert rows["language_model.model.layers.*.mlp.experts.*.gate_proj.weight_scale"]["form"] == "INT4 scales"
    every = as_json(convert, made("kimi_k25"), "--every")
    assert [row["name"] for row in every["rows"]] == sorted(stored, key=natural)
    assert every["nbytes"] == found["nbytes"]


def natural(name):
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in name.split(".")]


def test_forms_of_fp8(made, convert):
    rows = rows_by_name(as_json(convert, made("deepseek_v3_fp8")))
    assert rows["model.layers.*.self_attn.o_proj.weight"]["form"] == "FP8 codes"
    assert rows["model.layers.*.self_attn.o_proj.weight_scale_inv"]["form"] == "FP8 scales"
    assert rows["lm_head.weight"]["form"] == "weight"


@pytest.mark.parametrize("layers", ["stacked", "numbered"])
def test_a_converted_checkpoint_counts_shared_bytes_once(layers, made, convert, tmp_path):
    convert("to-megatron", made("qwen3_moe"), tmp_path / "mg", "--layer-keys", layers)
    found = as_json(convert, tmp_path / "mg", "--every")
    weights = megatron_tensors(made("qwen3_moe"), layers == "numbered")
    assert found["tensors"] == len(weights)
    assert (
        found["nbytes"]
        == sum(t.nbytes for t in weights.values())
        == sum(t.nbytes for t in stored_tensors(made("qwen3_moe")).values())
    )
    aliases = [row for row in found["rows"] if row["form"].startswith("= ")]
    assert len(aliases) == (1 if layers == "stacked" else 4)
    for row in aliases:
        owner = rows_by_name(found)[row["form"].removeprefix("= ")]
        assert (row["nbytes"], row["shape"], row["dtype"]) == (0, owner["shape"], owner["dtype"])
    code, out, _ = convert("inspect", tmp_path / "mg")
    assert code == 0
    assert re.search(
        r"pre_mlp_layernorm\.weight .*  = decoder\.layers\.(\*\.)?mlp\.linear_fc1\.layer_norm_weight$", out, re.M
    )
    assert out.splitlines()[-1].startswith(f"{tmp_path / 'mg'}: torch_dist, {len(weights)} tensors, ")
    assert out.splitlines()[-1].endswith(", iteration 0")


@pytest.mark.parametrize("inside", ["", "release"])
def test_what_is_kept_for_the_way_back(inside, made, convert, tmp_path):
    convert("to-megatron", made("kimi_k25"), tmp_path / "mg")
    found = as_json(convert, tmp_path / "mg" / inside)
    passthrough = rows_by_name(found, "passthrough")
    assert passthrough["language_model.model.layers.*.mlp.experts.*.up_proj.weight_scale"]["form"] == "INT4 scales"
    assert passthrough["vision_tower.encoder.blocks.*.wo.weight"]["count"] == 2
    weights = {
        n: t
        for n, t in stored_tensors(made("kimi_k25")).items()
        if n.startswith(("vision", "mm_")) or n.endswith(("_scale", "_shape"))
    }
    assert sum(row["nbytes"] for row in passthrough.values()) == sum(t.nbytes for t in weights.values())
    out = convert("inspect", tmp_path / "mg" / inside)[1]
    assert "\nkept for the way back, in hf/\n" in out
    assert rows_by_name(found).keys().isdisjoint(passthrough)


@pytest.mark.parametrize("common_object", [False, True])
def test_a_checkpoint_of_megatron(common_object, made, convert, tmp_path):
    tensors = megatron_tensors(made("qwen3"), False)
    root = write_foreign(tmp_path / "run", tensors, padding=13, common_object=common_object)
    found = as_json(convert, root)
    assert (found["tensors"], found["optimizer"], found["objects"]) == (len(tensors), len(tensors), 2)
    assert found["common"]["iteration"] == 100
    assert found["common"]["args"] == {"num_layers": 4, "hidden_size": 96, "tensor_model_parallel_size": 2, "lr": 1e-5}
    code, out, _ = convert("inspect", root)
    assert code == 0
    assert out.splitlines()[-2].endswith(", iteration 100")
    assert (
        out.splitlines()[-1] == "written by Megatron-LM with num_layers=4, hidden_size=96, tensor_model_parallel_size=2"
    )


def test_types_that_no_model_has(convert, tmp_path):
    tensors = {
        "a.b": torch.zeros(3, dtype=torch.complex64),
        "a..c": torch.zeros(2, dtype=torch.float64),
        "a": torch.zeros(()),
    }
    root = write_foreign(tmp_path / "run", tensors)
    rows = rows_by_name(as_json(convert, root))
    assert {name: (row["dtype"], row["nbytes"]) for name, row in rows.items()} == {
        "a.b": ("C64", 24),
        "a..c": ("F64", 16),
        "a": ("F32", 4),
    }
    assert convert("inspect", root)[0] == 0


def test_tensors_without_elements_are_no_aliases():
    empty = {key: ChunkedTensor("F32", (0,), ()) for key in "ab"}
    assert [row[3] for row in _checkpoint_rows(empty)] == ["weight", "weight"]


def test_an_unfinished_conversion_is_refused(made, refused, tmp_path):
    """On S3 its files have their final names before it is whole."""
    save_file({"w": torch.zeros(2)}, tmp_path / "model.safetensors")
    (tmp_path / "conversion.json").write_text("{}")
    assert refused("inspect", tmp_path) == f"{tmp_path}: its conversion is not finished; run the same command again."


def test_neither_of_both(refused, tmp_path):
    assert "give the folder of a torch_dist checkpoint" in refused("inspect", tmp_path)
    (tmp_path / "file").write_text("")
    assert "is a file" in refused("inspect", tmp_path / "file")

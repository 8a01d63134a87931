"""HF → Megatron → HF gives the same files, for every family, type and quantised form."""

from __future__ import annotations

import json

import pytest

torch = pytest.importorskip("torch")

import torch.distributed.checkpoint as dcp  # noqa: E402
from convert_helpers import change, files, megatron_tensors  # noqa: E402
from safetensors import safe_open  # noqa: E402
from tiny_models import FAMILIES, dequantise, make, stored_tensors, unstacked  # noqa: E402
from turns import in_turn  # noqa: E402

from megatron_fleet.storage import local  # noqa: E402
from megatron_fleet.weights.torch_dist.folder import TRACKER  # noqa: E402


def there_and_back(convert, source, tmp_path, *options):
    code, out, _ = convert("to-megatron", source, tmp_path / "mg", *options)
    assert (code, out) == (0, f"{tmp_path / 'mg'}: complete\n")
    code, out, _ = convert("to-hf", tmp_path / "mg", tmp_path / "back")
    assert (code, out) == (0, f"{tmp_path / 'back'}: complete\n")
    return files(tmp_path / "back")


@pytest.mark.parametrize("family", in_turn(FAMILIES, ("qwen3", "qwen3_5_moe")))
def test_every_family_comes_back_to_the_byte(family, made, convert, tmp_path):
    assert there_and_back(convert, made(family), tmp_path) == files(made(family))
    code, out, _ = convert("verify", made(family), tmp_path / "mg")
    assert (code, out.rstrip()) == (
        0,
        f"{len_compared(made(family))} tensors are equal in {made(family)} and {tmp_path / 'mg'}",
    )


def len_compared(folder):
    parts = ("_scale", "_shape", "_scale_inv")
    return len([name for name in unstacked(stored_tensors(folder)) if not name.endswith(parts)])


@pytest.mark.parametrize("layers", ["stacked", "numbered"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_types_and_both_forms_of_keys(dtype, layers, convert, tmp_path):
    source = make("qwen3_moe", tmp_path / "hf", dtype)
    assert there_and_back(convert, source, tmp_path, "--layer-keys", layers) == files(source)


def test_types_that_differ_between_layers_and_tensors(copied, convert, tmp_path):
    """Norms in float32, and one layer of a stack in another type than the rest."""
    source = copied("qwen3")

    def widen(name, tensor):
        return tensor.float() * 1.001 if "norm" in name or name.startswith("model.layers.1.mlp") else None

    change(source, widen)
    assert there_and_back(convert, source, tmp_path) == files(source)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scales_in_half_precision_come_back_in_their_type(dtype, copied, convert, tmp_path):
    """Qwen3's own FP8 releases store them so."""
    source = copied("deepseek_v3_fp8")
    change(source, lambda name, tensor: tensor.to(dtype) if name.endswith("_scale_inv") else None)
    assert there_and_back(convert, source, tmp_path) == files(source)
    assert convert("verify", source, tmp_path / "mg")[0] == 0
    code, _, _ = convert("to-hf", tmp_path / "mg", tmp_path / "wide", "--dtype", "bfloat16")
    expected = dequantise(stored_tensors(source))
    assert code == 0
    for name, tensor in stored_tensors(tmp_path / "wide").items():
        assert torch.equal(tensor.float(), expected[name]), name


def test_single_file_without_an_index(made, convert, tmp_path):
    from safetensors.torch import save_file

    source = tmp_path / "hf"
    source.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (source / name).write_bytes((made("qwen3_tied") / name).read_bytes())
    save_file(stored_tensors(made("qwen3_tied")), source / "model.safetensors", metadata={"format": "pt"})
    assert there_and_back(convert, source, tmp_path) == files(source)


def test_a_tied_head_that_is_stored_all_the_same(copied, convert, tmp_path):
    from safetensors.torch import load_file, save_file

    source = copied("qwen3_tied")
    index = json.loads((source / "model.safetensors.index.json").read_text())
    first = source / min(index["weight_map"].values())
    tensors = load_file(first)
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, first)
    index["weight_map"]["lm_head.weight"] = first.name
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    assert there_and_back(convert, source, tmp_path) == files(source)


@pytest.mark.parametrize(
    ("family", "numbered"),
    [("qwen3_moe", False), ("qwen3_moe", True), ("kimi_k25", True), ("deepseek_v3_mtp", True), ("moonlight", True)],
)
def test_torch_reads_what_megatron_would_have_saved(family, numbered, made, convert, tmp_path):
    options = ("--layer-keys", "numbered" if numbered else "stacked")
    assert convert("to-megatron", made(family), tmp_path / "mg", *options)[0] == 0
    assert (tmp_path / "mg" / TRACKER).read_text() == "release"
    expected = megatron_tensors(made(family), numbered)
    written = dcp.FileSystemReader(tmp_path / "mg" / "release").read_metadata().state_dict_metadata
    assert {key: written[key].properties.dtype for key in expected} == {key: t.dtype for key, t in expected.items()}
    found = {key: torch.full_like(tensor, float("nan")) for key, tensor in expected.items()}
    dcp.load(found, checkpoint_id=tmp_path / "mg" / "release", no_dist=True)
    assert [key for key in expected if not torch.equal(found[key], expected[key])] == []


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [3000, 100_000])
def test_how_the_checkpoint_is_cut_does_not_matter(chunk, made, convert, tmp_path, monkeypatch):
    from megatron_fleet.convert import content, template, to_megatron

    monkeypatch.setattr(to_megatron, "CHUNK_BYTES", chunk)
    monkeypatch.setattr(to_megatron, "FILE_BYTES", 150_000)
    monkeypatch.setattr(template, "PASSTHROUGH_BYTES", 30_000)
    monkeypatch.setattr(content, "STEP_BYTES", 300)
    monkeypatch.setattr(local, "PART", 8192)
    assert there_and_back(convert, made("kimi_k25"), tmp_path) == files(made("kimi_k25"))
    assert len(list((tmp_path / "mg" / "release").glob("*.distcp"))) > 3
    passthrough = list((tmp_path / "mg" / "hf").glob("passthrough-*"))
    assert len(passthrough) > 1
    # Data begin aligned, as in files of the format's own writer.
    assert [int.from_bytes(file.read_bytes()[:8], "little") % 8 for file in passthrough] == [0] * len(passthrough)


def test_a_converted_folder_converts_again(made, convert, tmp_path):
    """Its journal is not taken for a part of the model."""
    first = there_and_back(convert, made("qwen3"), tmp_path)
    (tmp_path / "again").mkdir()
    assert there_and_back(convert, tmp_path / "back", tmp_path / "again") == first
    journal = json.loads((tmp_path / "again" / "back" / "conversion.json").read_text())
    assert journal["source"] == f"{tmp_path / 'again' / 'mg'}/release"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("family", ["deepseek_v3_mtp", "kimi_k25"])
def test_one_type_for_all_weights(family, dtype, made, convert, tmp_path, monkeypatch):
    from megatron_fleet.convert import to_hf

    monkeypatch.setattr(to_hf, "SHARD_BYTES", 400_000)
    convert("to-megatron", made(family), tmp_path / "mg")
    assert convert("to-hf", tmp_path / "mg", tmp_path / "plain", "--dtype", dtype)[0] == 0
    config = json.loads((tmp_path / "plain" / "config.json").read_text())
    text = config.get("text_config", config)
    assert "quantization_config" not in config and "quantization_config" not in text
    assert dtype in (config.get("dtype"), config.get("torch_dtype"))
    shards = sorted((tmp_path / "plain").glob("*.safetensors"))
    assert len(shards) > 1
    for shard in shards:
        with safe_open(shard, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - no mapping
                kept = name.startswith(("vision_tower", "mm_projector")) or name.endswith("correction_bias")
                assert kept or file.get_tensor(name).dtype == getattr(torch, dtype), name
    # Weights, copies and passthrough tensors are all there; float16 has not bfloat16's range of exponents.
    tolerance = ("--tolerance", "0.001") if dtype == "float16" else ()
    assert convert("verify", made(family), tmp_path / "plain", *tolerance)[0] == 0

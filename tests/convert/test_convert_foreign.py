"""Checkpoints that Megatron-LM or a run of this project wrote: cut for ranks, padded, with optimizer and objects."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import numpy as np  # noqa: E402
from convert_helpers import change, files, megatron_tensors, write_foreign  # noqa: E402
from tiny_models import dequantise, make, stored_tensors  # noqa: E402

from megatron_fleet.weights.quant import fp8, int4  # noqa: E402

CASES = [
    ("qwen3", False, 4),
    ("qwen3_tied", True, 2),
    ("qwen3_moe", False, 2),
    ("moonlight", True, 1),
    ("qwen3_vl", False, 2),
]


@pytest.mark.parametrize("common_object", [False, True])
@pytest.mark.parametrize(("family", "numbered", "ranks"), CASES)
def test_comes_out_as_the_template_is(family, numbered, ranks, common_object, made, convert, tmp_path):
    tensors = megatron_tensors(made(family), numbered)
    root = write_foreign(tmp_path / "run", tensors, ranks, padding=13, common_object=common_object)
    code, _, errors = convert("to-hf", root, tmp_path / "out", "--template", made(family))
    assert (code, errors.count("\n")) == (0, 1)
    assert files(tmp_path / "out") == files(made(family))


def test_wider_weights_take_the_type_that_is_asked_for(made, convert, tmp_path):
    """A float32 checkpoint of a bfloat16 model: rounded like the template, or kept."""
    tensors = megatron_tensors(made("qwen3"), False)
    trained = {key: (t.float() * 1.001).contiguous() for key, t in tensors.items()}
    root = write_foreign(tmp_path / "run", trained)
    for dtype in ("template", "float32", "float16"):
        out = tmp_path / dtype
        assert convert("to-hf", root, out, "--template", made("qwen3"), "--dtype", dtype)[0] == 0
        kind = torch.bfloat16 if dtype == "template" else getattr(torch, dtype)
        for name, tensor in stored_tensors(out).items():
            expected = (stored_tensors(made("qwen3"))[name].float() * 1.001).to(kind)
            assert torch.equal(tensor, expected), name


def trained(source, tmp_path):
    """A checkpoint in which every third weight of a quantised template has changed."""
    tensors = megatron_tensors(source, True)
    for key, tensor in tensors.items():
        if tensor.ndim > 1 and "linear" in key:
            tensor.view(-1)[::3] += 0.01
    return write_foreign(tmp_path / "run", tensors)


def bits(tensor):
    return tensor.view(torch.int16).numpy().view(np.uint16)


def upwards(scales, dtype):
    """The nearest values of a type that are not below the scales, so that no weight is cut off."""
    near = torch.from_numpy(scales).to(dtype)
    next_one = torch.nextafter(near, torch.tensor(torch.inf, dtype=dtype))
    return torch.where(near.float() < torch.from_numpy(scales), next_one, near).float().numpy()


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("kimi_k25", torch.bfloat16),
        ("deepseek_v3_fp8", torch.float32),
        ("deepseek_v3_fp8", torch.bfloat16),
        ("deepseek_v3_fp8", torch.float16),
    ],
)
def test_trained_weights_are_quantised_by_the_declared_rule(family, kind, copied, convert, tmp_path):
    source = copied(family)
    change(source, lambda name, tensor: tensor.to(kind) if name.endswith("_scale_inv") else None)
    root = trained(source, tmp_path)
    assert convert("to-hf", root, tmp_path / "wide", "--template", source, "--dtype", "bfloat16")[0] == 0
    assert convert("to-hf", root, tmp_path / "quantised", "--template", source)[0] == 0
    before, after, exact = (stored_tensors(f) for f in (source, tmp_path / "quantised", tmp_path / "wide"))
    assert {name: (t.dtype, t.shape) for name, t in after.items()} == {
        name: (t.dtype, t.shape) for name, t in before.items()
    }
    checked = changed = 0
    for name in after:
        if name.endswith(".weight_packed"):
            base = name.removesuffix("_packed")
            weights, hint = bits(exact[base]), bits(before[f"{base}_scale"])
            scales, _ = int4.choose_scales(weights, hint)
            packed = np.empty(after[name].shape, np.int32)
            int4.quantize(weights, scales, packed)
            assert np.array_equal(bits(after[f"{base}_scale"]), scales)
            assert np.array_equal(after[name].numpy(), packed)
        elif name.endswith(".weight_scale_inv"):
            base = name.removesuffix("_scale_inv")
            weights, hint = bits(exact[base]), before[name].float().numpy()
            scales = upwards(fp8.choose_scales(weights, hint)[0], kind)
            codes = np.empty(weights.shape, np.uint8)
            fp8.quantize(weights, scales, codes)
            assert np.array_equal(after[name].float().numpy(), scales)
            assert np.array_equal(after[base].view(torch.uint8).numpy(), codes)
        else:
            continue
        checked += 1
        changed += not torch.equal(before[name], after[name])
    assert checked > 20 and changed > checked // 2
    # What was quantised stays near what was trained: half a step of 7 or of E4M3's 448.
    decoded = dequantise(after)
    for name, tensor in decoded.items():
        if name in exact and not name.startswith("vision"):
            peak = exact[name].float().abs().max()
            assert (tensor - exact[name].float()).abs().max() <= peak / 13, name


def test_a_weight_that_is_no_number_is_named(made, refused, tmp_path):
    tensors = megatron_tensors(made("kimi_k2_thinking"), True)
    tensors["decoder.layers.2.mlp.experts.experts.linear_fc1.weight"][3, 5, 7] = float("nan")
    root = write_foreign(tmp_path / "run", tensors)
    said = refused("to-hf", root, tmp_path / "out", "--template", made("kimi_k2_thinking"))
    assert said.startswith("model.layers.2.mlp.experts.3.gate_proj.weight holds NaN or infinity")
    assert not (tmp_path / "out").exists()


def test_without_a_template_it_says_what_to_do(made, refused, tmp_path):
    root = write_foreign(tmp_path / "run", megatron_tensors(made("qwen3"), False))
    said = refused("to-hf", root, tmp_path / "out")
    assert said.startswith(f"{root}/iter_0000100 does not say which model it is (checkpoint argument ")
    assert "give --template with the HF folder" in said


def test_the_template_may_be_a_converted_checkpoint(made, convert, tmp_path):
    """Training began from one, and its HF folder is gone."""
    convert("to-megatron", made("kimi_k25"), tmp_path / "start")
    root = write_foreign(tmp_path / "run", megatron_tensors(made("kimi_k25"), True))
    assert convert("to-hf", root, tmp_path / "out", "--template", tmp_path / "start")[0] == 0
    assert files(tmp_path / "out") == files(made("kimi_k25"))


@pytest.fixture
def run_folder(tmp_path):
    """A run of this project, its model beside it, and the committed checkpoint of step 12."""
    model = make("qwen3", tmp_path / "model", torch.float32)
    step = tmp_path / "mine" / "checkpoints" / "step_000012"
    write_foreign(tmp_path / "foreign", megatron_tensors(model, False, torch.float32))
    step.parent.mkdir(parents=True)
    (tmp_path / "foreign" / "iter_0000100").rename(step)
    (tmp_path / "mine" / "config.json").write_text(json.dumps({"model": {"path": str(model)}}))
    names = {p.name: p.read_bytes() for p in step.iterdir()}
    listed = {n: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()} for n, data in names.items()}
    (step / "manifest.json").write_text(json.dumps({"format": 1, "step": 12, "files": listed}))
    return tmp_path / "mine"


@pytest.mark.parametrize("given", ["run", "step", "from inside"])
def test_a_step_of_a_run_needs_no_template(given, run_folder, convert, tmp_path, monkeypatch):
    step: Path | str = run_folder / "checkpoints" / "step_000012"
    if given == "from inside":
        monkeypatch.chdir(run_folder / "checkpoints")
        step = "step_000012"
    assert convert("to-hf", run_folder if given == "run" else step, tmp_path / "out")[0] == 0
    assert files(tmp_path / "out") == files(tmp_path / "model")


def test_the_model_of_a_run_that_is_gone(run_folder, refused, tmp_path):
    shutil.rmtree(tmp_path / "model")
    said = refused("to-hf", run_folder, tmp_path / "out")
    assert f"({tmp_path / 'model'}, which its run began with, is not there); give --template" in said


def test_a_step_is_compared_with_its_manifest_first(run_folder, refused, tmp_path):
    shard = next((run_folder / "checkpoints" / "step_000012").glob("*.distcp"))
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    assert refused("to-hf", run_folder, tmp_path / "out").startswith(f"{shard} is damaged")
    shard.write_bytes(data[:-1])
    said = refused("to-hf", run_folder, tmp_path / "out")
    assert said.startswith(f"{shard} has {len(data) - 1} bytes, manifest.json says {len(data)}")
    assert not (tmp_path / "out").exists()


def test_a_manifest_that_is_none(run_folder, refused, tmp_path):
    manifest = run_folder / "checkpoints" / "step_000012" / "manifest.json"
    manifest.write_text('{"files": {"common.pt": {}}}')
    assert refused("to-hf", run_folder, tmp_path / "out") == f"{manifest}: malformed; use another checkpoint."
    manifest.write_text('{"files": {"__9_0.distcp": {"bytes": 1, "sha256": ""}}}')
    assert "__9_0.distcp is missing although manifest.json lists it" in refused("to-hf", run_folder, tmp_path / "out")

"""A folder fits its configuration exactly, or is refused naming file and tensor."""

from __future__ import annotations

import json
import re

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import save_file  # noqa: E402
from tiny_models import FAMILIES, make, stored_tensors  # noqa: E402

from megatron_fleet.config.errors import UserError  # noqa: E402
from megatron_fleet.weights.hf_folder import INDEX, SINGLE  # noqa: E402
from megatron_fleet.weights.hf_model import Fp8, Int4, Plain, open_model  # noqa: E402

Q, NORM = "model.layers.1.self_attn.q_proj", "model.layers.1.input_layernorm.weight"
EXPERT = "model.layers.1.mlp.experts.3.up_proj"
LATENT = "model.layers.1.self_attn.kv_b_proj"


def edit_config(folder, **fields):
    config = json.loads((folder / "config.json").read_text()) | fields
    (folder / "config.json").write_text(json.dumps(config))


def rewrite(folder, changes=None, files=(SINGLE,), **config):
    """The folder with other tensors (``None``: without), spread over ``files`` by turns."""
    tensors = stored_tensors(folder) | (changes or {})
    tensors = {name: tensor.contiguous() for name, tensor in sorted(tensors.items()) if tensor is not None}
    for path in (*folder.glob("*.safetensors"), folder / INDEX):
        path.unlink(missing_ok=True)
    for k, file in enumerate(files):
        save_file({name: t for i, (name, t) in enumerate(tensors.items()) if i % len(files) == k}, folder / file)
    if len(files) > 1:
        weight_map = {name: files[i % len(files)] for i, name in enumerate(tensors)}
        (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    edit_config(folder, **config)
    return folder


def refusal(folder):
    with pytest.raises(UserError) as e:
        open_model(folder)
    assert "\n" not in str(e.value)
    return str(e.value).replace(str(folder), "")


@pytest.mark.parametrize("family", FAMILIES)
def test_every_stored_tensor_has_its_place(family, tmp_path):
    folder = make(family, tmp_path)
    model, stored = open_model(folder), stored_tensors(folder)
    assert model.stored.keys() == stored.keys()
    assert {name: tensor.shape for name, tensor in model.stored.items()} == {
        n: tuple(t.shape) for n, t in stored.items()
    }
    parts = {id(part) for encoding in model.encodings.values() for part in encoding.parts}
    rest = {name for name, entry in model.stored.items() if id(entry) not in parts}
    assert rest == {*model.passthrough, *(model.table.repeated.keys() & stored.keys())}
    assert model.encodings.keys() == model.table.tensors.keys()


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_quantised_is_seen_from_the_names(family, tmp_path):
    folder = make(family, tmp_path)
    stored = stored_tensors(folder)
    # The lists of what is not quantised lie in published models; they must not be asked.
    config = json.loads((folder / "config.json").read_text())
    for part in (config, config.get("text_config", {})):
        if "quantization_config" in part:
            part["quantization_config"] |= {"ignore": ["re:.*experts.*"], "modules_to_not_convert": ["model"]}
    (folder / "config.json").write_text(json.dumps(config))
    encodings = open_model(folder).encodings
    kinds = {
        kind: {n for n, encoding in encodings.items() if isinstance(encoding, kind)} for kind in (Plain, Fp8, Int4)
    }
    assert kinds[Int4] == {n.removesuffix("_packed") for n in stored if n.endswith("_packed")}
    assert kinds[Fp8] == {n.removesuffix("_scale_inv") for n in stored if n.endswith("_scale_inv")}
    assert kinds[Plain] == encodings.keys() - kinds[Int4] - kinds[Fp8]
    assert bool(kinds[Int4]) == (family in ("kimi_k2_thinking", "kimi_k25"))
    assert bool(kinds[Fp8]) == family.endswith("_fp8")


def test_parts_may_lie_in_other_files(tmp_path):
    folder = rewrite(make("kimi_k2_thinking", tmp_path), files=[f"model-{i}-of-5.safetensors" for i in range(1, 6)])
    files = [{part.file for part in e.parts} for e in open_model(folder).encodings.values() if isinstance(e, Int4)]
    assert all(len(of_one) == 3 for of_one in files)


def wide(rows, columns, dtype=torch.bfloat16):
    return torch.zeros(rows, columns).to(dtype)


def packed(name, rows, columns):
    """A tensor as INT4 in the place of the whole one."""
    parts = {
        "packed": wide(rows, columns // 8, torch.int32),
        "scale": wide(rows, 1),
        "shape": torch.tensor([rows, columns]),
    }
    return {f"{name}.weight": None} | {f"{name}.weight_{part}": tensor for part, tensor in parts.items()}


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("qwen3", {f"{Q}.weight": None}, rf": tensor {Q}\.weight is missing; use the files that belong to config"),
        ("qwen3", {"lm_head.weight": None}, r": tensor lm_head\.weight is missing"),
        (
            "qwen3",
            {f"{Q}.weight": wide(128, 95)},
            rf"/{SINGLE}: tensor {Q}\.weight has shape \[128, 95\]; .* asks for \[128, 96\]",
        ),
        ("qwen3", {f"{Q}.weight": wide(96, 128)}, r"has shape \[96, 128\]"),
        ("qwen3", {NORM: torch.ones(1, 96)}, rf"{NORM} has shape \[1, 96\]; config\.json asks for \[96\]"),
        ("qwen3", {NORM: torch.ones(96, dtype=torch.float64)}, rf"{NORM} is stored as F64; use F32 or BF16 or F16"),
        ("qwen3", {NORM: torch.ones(96, dtype=torch.int16)}, "is stored as I16"),
        (
            "qwen3",
            {NORM: torch.ones(96).to(torch.float8_e4m3fn), NORM + "_scale_inv": torch.ones(1)},
            "is stored as F8_E4M3",
        ),
        ("qwen3", {f"{Q}.bias": torch.ones(128)}, rf"/{SINGLE}: tensor {Q}\.bias is not part of the model"),
        ("qwen3", {"model.layers.5.mlp.up_proj.weight": wide(112, 96)}, "layers.5.* is not part of the model"),
        ("deepseek_v3", {"model.layers.5.mlp.up_proj.weight": wide(112, 96)}, None),
        ("qwen3", {"model.layers.44.mlp.up_proj.weight": wide(112, 96)}, "layers.44.* is not part of the model"),
        ("qwen3_tied", {"lm_head.weight": wide(514, 96)}, r"lm_head\.weight has shape \[514, 96\]"),
        ("qwen3_tied", {"lm_head.weight": wide(515, 96)}, None),
        (
            "deepseek_v3_fp8",
            {f"{LATENT}.weight_scale_inv": None},
            rf": tensor {LATENT}\.weight_scale_inv of {LATENT}\.weight is missing",
        ),
        ("deepseek_v3_fp8", {f"{LATENT}.weight": None}, rf": tensor {LATENT}\.weight is missing"),
        (
            "deepseek_v3_fp8",
            {f"{LATENT}.weight": wide(288, 128)},
            rf"{LATENT}\.weight_scale_inv is not part of the model",
        ),
        (
            "deepseek_v3_fp8",
            {f"{LATENT}.weight_scale_inv": torch.ones(2, 1)},
            rf"{LATENT}\.weight_scale_inv has shape \[2, 1\]; .* \[3, 1\]",
        ),
        ("deepseek_v3_fp8", {f"{LATENT}.weight_scale_inv": wide(3, 1)}, None),
        ("deepseek_v3_fp8", {f"{LATENT}.weight_scale_inv": wide(3, 1, torch.float16)}, None),
        (
            "deepseek_v3_fp8",
            {f"{LATENT}.weight_scale_inv": wide(3, 1, torch.float64)},
            "weight_scale_inv is stored as F64; use F32 or BF16 or F16",
        ),
        ("deepseek_v3_fp8", {f"{LATENT}.weight": wide(288, 128, torch.float8_e5m2)}, r"is stored as F8_E5M2"),
        ("deepseek_v3_fp8", {f"{LATENT}.weight": wide(288, 127, torch.float8_e4m3fn)}, r"\[288, 127\].*\[288, 128\]"),
        ("kimi_k2_thinking", {f"{EXPERT}.weight_packed": None}, rf": tensor {EXPERT}\.weight is missing"),
        (
            "kimi_k2_thinking",
            {f"{EXPERT}.weight_scale": None},
            rf"{EXPERT}\.weight_scale of {EXPERT}\.weight is missing",
        ),
        (
            "kimi_k2_thinking",
            {f"{EXPERT}.weight_shape": None},
            rf"{EXPERT}\.weight_shape of {EXPERT}\.weight is missing",
        ),
        ("kimi_k2_thinking", {f"{EXPERT}.weight": wide(64, 96)}, "is stored as a whole and as INT4; remove one"),
        (
            "kimi_k2_thinking",
            {f"{EXPERT}.weight_packed": wide(64, 11, torch.int32)},
            r"weight_packed has shape \[64, 11\]; .* \[64, 12\]",
        ),
        ("kimi_k2_thinking", {f"{EXPERT}.weight_packed": wide(64, 12, torch.int64)}, "weight_packed is stored as I64"),
        (
            "kimi_k2_thinking",
            {f"{EXPERT}.weight_scale": wide(64, 1)},
            r"weight_scale has shape \[64, 1\]; .* \[64, 3\]",
        ),
        (
            "kimi_k2_thinking",
            {f"{EXPERT}.weight_scale": wide(64, 3, torch.float16)},
            "weight_scale is stored as F16; use BF16",
        ),
        (
            "kimi_k2_thinking",
            {f"{EXPERT}.weight_shape": torch.ones(3, dtype=torch.int32)},
            r"weight_shape has shape \[3\]",
        ),
        ("kimi_k2_thinking", {f"{EXPERT}.weight_shape": torch.ones(2)}, "weight_shape is stored as F32"),
        ("kimi_k2_thinking", {f"{EXPERT}.weight_g_idx": torch.ones(96)}, r"weight_g_idx is not part of the model"),
        (
            "deepseek_v3",
            packed(LATENT, 288, 24),
            r"kv_b_proj\.weight has shape \[288, 24\], which INT4 groups of 32 do not",
        ),
        ("deepseek_v3_mtp", {"model.layers.4.enorm.weight": None}, r"model\.layers\.4\.enorm\.weight is missing"),
        (
            "deepseek_v3_mtp",
            {"model.layers.4.embed_tokens.weight": wide(515, 95)},
            r"layers\.4\.embed_tokens\.weight has shape",
        ),
        ("deepseek_v3_mtp", {"model.layers.4.embed_tokens.weight": None}, None),
        ("kimi_k25", {"model.layers.0.input_layernorm.weight": torch.ones(96)}, "is not part of the model"),
        ("kimi_k25", {"vision_tower.new.weight": torch.ones(96)}, None),
    ],
)
def test_what_does_not_fit_is_refused_by_name(family, changes, message, tmp_path):
    folder = rewrite(make(family, tmp_path), changes)
    if message is None:
        open_model(folder)
    else:
        said = refusal(folder)
        assert re.search(message, said), said


def test_announced_prediction_layers_may_be_absent_altogether(tmp_path):
    folder = make("deepseek_v3_mtp", tmp_path)
    assert open_model(folder).table.model.mtp == 1
    names = [name for name in stored_tensors(folder) if name.startswith("model.layers.4.")]
    model = open_model(rewrite(folder, dict.fromkeys(names)))
    assert model.table.model.mtp == 0 and not model.passthrough


def test_prediction_layers_may_be_left_alone(tmp_path):
    folder = make("deepseek_v3_mtp", tmp_path)
    whole, without = open_model(folder), open_model(folder, prediction=False)
    more = {name for name in whole.stored if name.startswith("model.layers.4.")}
    assert set(without.passthrough) == more and without.table.model.mtp == 0
    assert without.encodings.keys() == whole.encodings.keys() - more


def test_prediction_layers_that_are_not_announced_are_carried(tmp_path):
    folder = make("deepseek_v3_mtp", tmp_path)
    edit_config(folder, num_nextn_predict_layers=0)
    model = open_model(folder)
    names = {name for name in stored_tensors(folder) if name.startswith("model.layers.4.")}
    assert set(model.passthrough) == names and "model.layers.4.embed_tokens.weight" in names


FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def int4(**weights):
    weights = {"num_bits": 4, "type": "int", "group_size": 32, "symmetric": True} | weights
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": weights}}}


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        (None, None),
        (FP8 | {"scale_fmt": "ue8m0", "modules_to_not_convert": ["lm_head"]}, None),
        (int4(actorder=None), None),
        (FP8 | {"weight_block_size": [64, 128]}, r"weight_block_size=\[64, 128\] is not supported, only \[128, 128\]"),
        ({"quant_method": "fp8"}, "weight_block_size=None is not supported"),
        (int4(num_bits=8), "weights.num_bits=8 is not supported, only 4"),
        (int4(type="float"), "weights.type='float'"),
        (int4(group_size=128), "weights.group_size=128"),
        (int4(symmetric=False), "weights.symmetric=False"),
        ({"quant_method": "compressed-tensors", "config_groups": {"group_0": {}}}, "num_bits=None"),
        ({"quant_method": "compressed-tensors"}, "config_groups is not a JSON object"),
        ({"quant_method": "compressed-tensors", "config_groups": {"group_0": 3}}, "config_groups is not a JSON object"),
        (
            {"quant_method": "gptq", "bits": 4},
            r"quant_method='gptq' \(GPTQ, integers of 2 to 8 bits\) is not supported, only FP8 in",
        ),
        ({"quant_method": "modelopt"}, "quant_method='modelopt'"),
        ({"bits": 4}, "quant_method=None"),
        ("fp8", "quantization_config is not a JSON object"),
    ],
)
@pytest.mark.parametrize("where", ["qwen3", "kimi_k25", "text_config", "compression_config"])
def test_quantised_forms(declared, message, where, tmp_path):
    if where in ("kimi_k25", "text_config"):
        folder = make("kimi_k25", tmp_path)
        text = json.loads((folder / "config.json").read_text())["text_config"]
        edit_config(
            folder,
            **(
                {"quantization_config": declared}
                if where == "kimi_k25"
                else {"text_config": text | {"quantization_config": declared}}
            ),
        )
    else:
        folder = make("qwen3", tmp_path)
        name = "compression_config" if where == "compression_config" else "quantization_config"
        edit_config(folder, **{name: declared})
    if message is None:
        open_model(folder)
    else:
        said = refusal(folder)
        assert said.startswith("/config.json: ") and re.search(message.replace("quantization_config", ""), said), said

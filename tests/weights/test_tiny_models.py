"""The tiny models are what they claim to be: checked against transformers and compressed-tensors, not themselves."""

from __future__ import annotations

import json

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tiny_models import (  # noqa: E402
    FAMILIES,
    dequantise,
    make,
    raw_config,
    reference_logits,
    stored_tensors,
)

OWN_TO_TRANSFORMERS = [f for f in FAMILIES if not f.startswith("kimi") and not f.endswith(("_mtp", "_fp8"))]
WITH_MORE = ("qwen3_5", "qwen3_5_moe_text", "qwen3_5_moe")
"""Published with tensors that transformers drops, or stores in another form."""
IDS = (torch.arange(48) * 7 % 515).view(2, 24)


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_uses_every_tensor(family, tmp_path):
    logits = reference_logits(make(family, tmp_path), IDS)
    assert logits.shape == (2, 24, 515) and logits.dtype == torch.float32
    # Flat logits would hide an error, huge ones would drown a tolerance in rounding.
    assert 0.3 < logits.std() < 3


@pytest.mark.parametrize("family", [f for f in OWN_TO_TRANSFORMERS if f not in WITH_MORE])
def test_it_is_what_transformers_saves(family, tmp_path):
    folder = make(family, tmp_path / "tiny")
    name = raw_config(family, "v5")["architectures"][0]
    model = getattr(transformers, name).from_pretrained(folder, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "saved")
    ours, theirs = stored_tensors(folder), stored_tensors(tmp_path / "saved")
    if family == "moonlight":
        # Its publisher keeps stale tensors, and a bfloat16 correction that transformers widens.
        ours = {n: t.float() if "correction" in n else t for n, t in ours.items() if "inv_freq" not in n}
    assert ours.keys() == theirs.keys()
    assert [n for n, t in ours.items() if not equal(t, theirs[n])] == []


def without_nulls(config):
    if isinstance(config, dict):
        return {k: without_nulls(v) for k, v in config.items() if v is not None}
    return config


@pytest.mark.parametrize("family", OWN_TO_TRANSFORMERS)
def test_the_newer_dialect_is_what_transformers_writes(family, tmp_path):
    only_v4 = {"scoring_func", "topk_method", "moe_layer_freq", "seq_aux", "aux_loss_alpha", "ep_size"}
    old = {k: v for k, v in raw_config(family, "v4").items() if k not in only_v4}
    transformers.AutoConfig.for_model(**old).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    if family.startswith("glm4"):
        # Written twice when an older file is converted; once by a model that never was one.
        assert saved.pop("partial_rotary_factor") == saved["rope_parameters"]["partial_rotary_factor"]
    if family.startswith("qwen3_5"):
        # Kept when an older file is converted, unknown to a model that never was one.
        del saved.get("text_config", saved)["full_attention_interval"]
    assert without_nulls(saved) == without_nulls(raw_config(family, "v5"))


@pytest.mark.parametrize("family", FAMILIES)
def test_both_dialects_are_the_same_model(family, tmp_path):
    folder = make(family, tmp_path)
    logits = []
    for dialect in ("v4", "v5"):
        (folder / "config.json").write_text(json.dumps(raw_config(family, dialect)))
        logits.append(reference_logits(folder, IDS))
    assert torch.equal(*logits)
    assert raw_config(family, "v4") != raw_config(family, "v5")


@pytest.mark.slow
@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_a_misplaced_row_of_any_tensor_changes_the_logits(family, tmp_path, monkeypatch):
    import tiny_models

    folder = make(family, tmp_path)
    before = reference_logits(folder, IDS)
    wide = dequantise(stored_tensors(folder))
    outside = ("layers.0.", "layers.1.")
    changed = [n for n in wide if not any(part in n for part in outside) and ".experts." not in n]
    assert len(changed) > 20
    unseen = []
    for name in [*changed, *(n for n in wide if "layers.2.mlp.experts.0." in n)]:
        monkeypatch.setattr(tiny_models, "dequantise", lambda _, n=name: wide | {n: wide[n].roll(1, 0)})
        if (reference_logits(folder, IDS) - before).abs().max() < 1e-3:
            unseen.append(name)
    assert unseen == []


@pytest.mark.parametrize("family", ["qwen3_yarn", "llama3", "deepseek_v3", "kimi_k2", "glm4_moe"])
def test_the_rotary_settings_matter(family, tmp_path):
    folder = make(family, tmp_path)
    before = reference_logits(folder, IDS)
    config = raw_config(family, "v5")
    rope = config["rope_parameters"]
    if family == "kimi_k2":
        rope["beta_fast"] = 32.0
    elif family == "glm4_moe":
        rope["partial_rotary_factor"] = 1.0
    else:
        config["rope_parameters"] = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
    (folder / "config.json").write_text(json.dumps(config))
    assert (reference_logits(folder, IDS) - before).abs().max() > 1e-2


@pytest.mark.parametrize("family", ["kimi_k2_thinking", "kimi_k25"])
def test_int4_is_the_format_of_compressed_tensors(family, tmp_path):
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    stored = stored_tensors(make(family, tmp_path))
    names = [n.removesuffix("_packed") for n in stored if n.endswith("_packed")]
    layers, experts, projections = 3, 8, 3
    assert len(names) == layers * experts * projections and all(".mlp.experts." in n for n in names)
    assert not set(names) & set(stored)
    wide, codes_seen = dequantise(stored), set()
    for name in names:
        packed, scale, shape = (stored[f"{name}_{part}"] for part in ("packed", "scale", "shape"))
        assert (packed.dtype, scale.dtype, shape.dtype) == (torch.int32, torch.bfloat16, torch.int32)
        codes = helpers.unpack_from_int32(packed, 4, torch.Size(shape.tolist()))
        assert scale.shape == (shape[0], shape[1] // 32)
        expected = (codes.float() * scale.float().repeat_interleave(32, 1)).bfloat16().float()
        assert torch.equal(wide[name], expected)
        codes_seen |= set(codes.unique().tolist())
    assert codes_seen == set(range(-8, 8))


@pytest.mark.parametrize("family", ["deepseek_v3_fp8", "kimi_k2_fp8"])
def test_fp8_has_a_scale_for_each_block_and_part_of_a_block(family, tmp_path):
    stored = stored_tensors(make(family, tmp_path))
    names = [n.removesuffix("_scale_inv") for n in stored if n.endswith("_scale_inv")]
    assert {n for n, t in stored.items() if t.dtype == torch.float8_e4m3fn} == set(names)
    plain = ("embed_tokens", "lm_head", "mlp.gate.", "norm", "inv_freq")
    assert {n for n in stored if not n.endswith("_scale_inv")} - set(names) == {
        n for n in stored if any(part in n for part in plain)
    }
    wide, rests = dequantise(stored), set()
    for name in names:
        codes, scale = stored[name].float(), stored[f"{name}_scale_inv"]
        assert scale.dtype == torch.float32 and scale.shape == tuple(-(-n // 128) for n in codes.shape)
        for i in range(scale.shape[0]):
            for j in range(scale.shape[1]):
                box = slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128)
                assert torch.equal(wide[name][box], (codes[box] * scale[i, j]).bfloat16().float())
                assert codes[box].abs().max() == 448
        rests |= {n % 128 for n in codes.shape}
    assert len(rests) > 3


def test_multi_token_prediction_adds_a_layer_and_two_copies(tmp_path):
    with_mtp, without = (stored_tensors(make(f, tmp_path / f)) for f in ("deepseek_v3_mtp", "deepseek_v3"))
    added = with_mtp.keys() - without.keys()
    inner = {n.replace("layers.3.", "layers.4.") for n in without if "layers.3." in n}
    own = ("enorm", "hnorm", "eh_proj", "shared_head.norm", "shared_head.head", "embed_tokens")
    assert added == inner | {f"model.layers.4.{name}.weight" for name in own}
    assert torch.equal(with_mtp["model.layers.4.embed_tokens.weight"], with_mtp["model.embed_tokens.weight"])
    assert torch.equal(with_mtp["model.layers.4.shared_head.head.weight"], with_mtp["lm_head.weight"])
    assert with_mtp["model.layers.4.eh_proj.weight"].shape == (96, 192)


def test_kimi_k25_has_its_publishers_names(tmp_path):
    stored = stored_tensors(make("kimi_k25", tmp_path))
    outside = {n for n in stored if not n.startswith("language_model.")}
    blocks = 2
    assert len(outside) == 3 + 12 * blocks + 2 + 6
    assert {n.split(".")[0] for n in outside} == {"vision_tower", "mm_projector"}
    assert stored["vision_tower.encoder.blocks.1.wqkv.weight"].shape == (96, 32)
    assert stored["language_model.model.layers.1.mlp.gate.e_score_correction_bias"].dtype == torch.float32
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["quantization_config"] == config["text_config"]["quantization_config"]


@pytest.mark.parametrize("family", FAMILIES)
def test_files_and_index_agree(family, tmp_path):
    folder = make(family, tmp_path)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    stored = stored_tensors(folder)
    files = {p.name for p in folder.glob("*.safetensors")}
    assert set(index["weight_map"]) == set(stored) and set(index["weight_map"].values()) == files and len(files) == 3
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in stored.values())
    assert transformers.PreTrainedTokenizerFast.from_pretrained(folder).encode("a")


def test_seed_and_dtype(tmp_path):
    a, b, c, d = (
        stored_tensors(make("moonlight", tmp_path / str(k), **how))
        for k, how in enumerate(({}, {}, {"seed": 1}, {"dtype": torch.float32}))
    )
    assert all(equal(a[n], b[n]) for n in a)
    assert not any(equal(a[n], c[n]) for n in a)
    assert {t.dtype for n, t in a.items()} == {torch.bfloat16}
    assert {t.dtype for n, t in d.items() if "inv_freq" not in n and "correction" not in n} == {torch.float32}

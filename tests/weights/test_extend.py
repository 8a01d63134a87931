"""A longer context is written once, into the file that everybody reads.

The tiny model ``qwen3_yarn`` is compared with transformers and vLLM in test_families and test_vllm_families; what
``extend`` writes must be that model.
"""

from __future__ import annotations

import json

import pytest
from tiny_configs import raw_config

from megatron_fleet.cli import main
from megatron_fleet.config.errors import UserError
from megatron_fleet.models.hf_config import read_model
from megatron_fleet.weights.extend import extend, extended

DIALECTS = ("v4", "v5")


@pytest.mark.parametrize("dialect", DIALECTS)
def test_the_extended_model_is_the_one_with_yarn(dialect):
    raw = raw_config("qwen3", dialect) | {"max_position_embeddings": 128}
    before = json.dumps(raw)
    assert read_model(extended(raw, 4.0, 64)) == read_model(raw_config("qwen3_yarn", dialect)) != read_model(raw)
    assert json.dumps(raw) == before


@pytest.mark.parametrize("dialect", DIALECTS)
def test_transformers_reads_the_same_positions(dialect, tmp_path):
    transformers = pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps(extended(raw_config("qwen3", dialect), 8.0, 64)))
    rope = transformers.AutoConfig.from_pretrained(tmp_path).rope_parameters
    told = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "rope_theta": 1e6}
    assert {name: rope.get(name) for name in told} == told


def test_models_within_others_keep_the_rest():
    raw = raw_config("qwen3_vl", "v5")
    found = extended(raw, 16.0, 64)
    text, was = found.pop("text_config"), raw.pop("text_config")
    assert found == raw
    assert text["rope_parameters"] == {
        **was["rope_parameters"],
        "rope_type": "yarn",
        "factor": 16.0,
        "original_max_position_embeddings": 64,
    }


def test_the_folder_has_links_and_a_config_of_its_own(tmp_path, capsys):
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(raw_config("qwen3", "v4")))
    (source / "model.safetensors").write_bytes(b"weights")
    target = tmp_path / "long" / "model"
    arguments = ["model", "extend", str(source), str(target), "--factor", "8", "--original", "64"]
    assert main(arguments) == 0
    assert "512 tokens" in capsys.readouterr().out
    assert (target / "model.safetensors").read_bytes() == b"weights" and (target / "model.safetensors").is_symlink()
    assert read_model(json.loads((target / "config.json").read_text())).context == 512
    assert read_model(json.loads((source / "config.json").read_text())).context == 256
    assert main(arguments) == 2
    assert "already exists" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("family", "factor", "original", "said"),
    [
        ("qwen3_yarn", 2.0, 64, "already scaled"),
        ("llama3", 2.0, 64, "already scaled"),
        ("qwen3", 1.0, 64, "do not extend the context"),
        ("qwen3", float("nan"), 64, "do not extend the context"),
        ("qwen3", float("inf"), 64, "do not extend the context"),
        ("qwen3", 4.0, 10**400, r"original=1000000000000000000000000000000? are more than"),
        ("qwen3", 4.0, -(10**400), "do not extend the context"),
        ("qwen3", 2.0, 64, "has 256 as it is"),
    ],
)
def test_what_cannot_be_extended_is_refused(family, factor, original, said, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(raw_config(family, "v4")))
    with pytest.raises(UserError, match=said):
        extend(tmp_path / "model", tmp_path / "new", factor, original)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]

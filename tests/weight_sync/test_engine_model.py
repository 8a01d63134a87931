"""Engines in FP8 that vLLM could not build are refused before anything starts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

sys.path.append(str(Path(__file__).parents[1] / "rollout"))

import tiny_models
from block_models import block_config
from rollout_config import rollout_config

from megatron_fleet.config.errors import UserError
from megatron_fleet.weight_sync.engine_model import check_engine_fp8, fp8_declaration


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Family → a folder whose matrices consist of whole blocks."""
    root, made = tmp_path_factory.mktemp("blocks"), {}

    def get(family: str) -> Path:
        if family not in made:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(tiny_models, "raw_config", block_config)
                made[family] = tiny_models.make(family, root / family)
        return made[family]

    return get


def fp8_engine(folder, **engine):
    return rollout_config(folder, {"quantization": "fp8", **engine}, max_context=127)


def sections(config):
    return config.model, config.precision, config.rollout.engine


def check(config):
    check_engine_fp8(*sections(config))


@pytest.mark.parametrize(
    ("family", "engine", "problem"),
    [
        # One head of 64 for keys on each of two devices.
        ("qwen3", {"tensor_parallel": 2}, r"hold 64 rows of model\.layers\.0\.self_attn\.k_proj\.weight"),
        ("deepseek_v3", {"tensor_parallel": 2}, r"hold 192 rows of model\.layers\.0\.mlp\.gate_proj\.weight"),
        ("deepseek_v3", {"tensor_parallel": 4}, r"hold 32 rows of .*mlp\.experts\.0|hold 96 rows of"),
        ("deepseek_v3_mtp", {"speculative": {"method": "mtp"}}, "has its prediction layers in another type"),
    ],
)
def test_a_matrix_that_would_be_cut_inside_a_block_is_refused(folders, family, engine, problem):
    with pytest.raises(UserError, match=problem) as refused:
        check(fp8_engine(folders(family), **engine))
    assert "rollout.engine.quantization=none" in str(refused.value)


def test_whole_experts_and_matrices_on_one_device_are_not_cut(folders, monkeypatch):
    check(fp8_engine(folders("qwen3")))
    check(fp8_engine(folders("deepseek_v3")))
    check(rollout_config(folders("qwen3"), {"tensor_parallel": 2}, max_context=127))  # in BF16
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny_models, "raw_config", wide)
        folder = tiny_models.make("qwen3_moe", folders("qwen3").parent / "wide")
    check(fp8_engine(folder, tensor_parallel=2, expert_parallel=True))
    with pytest.raises(UserError, match=r"hold 64 rows of model\.layers\.0\.mlp\.experts\.0\.gate_proj\.weight"):
        check(fp8_engine(folder, tensor_parallel=2))


def wide(family, dialect):
    """Attention that two devices share in whole blocks, experts of one block."""
    return block_config(family, dialect) | {"head_dim": 128}


def test_a_folder_in_fp8_is_checked_too(tmp_path, folders, monkeypatch):
    monkeypatch.setattr(tiny_models, "raw_config", lambda *_: block_config("deepseek_v3_fp8", "v4"))
    folder = tiny_models.make("deepseek_v3_fp8", tmp_path)
    assert fp8_declaration(*sections(rollout_config(folder, max_context=127))) is None
    with pytest.raises(UserError, match="hold 192 rows of"):
        check(rollout_config(folder, {"tensor_parallel": 2}, max_context=127))

"""Every family that vLLM's CPU build runs, updated live from a real Megatron model: it says what transformers says.

vLLM 0.32 on CPU runs none of the others: FP8 blocks ("Failed to find a kernel that can implement the ScaledMM linear
layer"), INT4 experts ("No WNA16 MoE backend"), Qwen3-VL (needs torchvision), Kimi K2.5 (fails while it loads). What
those would receive is compared byte by byte in test_wire. Latent attention without YaRN (Moonlight) runs there, with
other results than transformers' from the start.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("megatron_fleet.trainer.megatron")
pytest.importorskip("transformers")
pytest.importorskip("vllm")

import tiny_models
import torch
from family_ranks import Layout, build
from test_vllm import EngineProcess
from tiny_configs import raw_config
from weight_fixtures import megatron_groups

from megatron_fleet.platform.communicator import Alone
from megatron_fleet.weight_sync.publish_shm import ShmPublisher
from megatron_fleet.weights.hf_config import read_model
from megatron_fleet.weights.load import load_hf
from megatron_fleet.weights.source import MegatronWeightSource, Place

PROMPTS = [[5, 6, 7, 8, 9, 10], [100, 33, 2, 77, 410, 3], [500, 1, 250, 9, 9, 14]]
TOKENS = 16


@pytest.fixture(scope="module")
def groups() -> Iterator[None]:
    with megatron_groups():
        yield


def served_config(family: str, dialect: str) -> dict[str, Any]:
    """As published (vLLM reads fields that transformers 5 leaves out), with heads as wide as vLLM's kernels need."""
    config = raw_config(family, "v4")
    if "kv_lora_rank" in config:
        return config | {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    if "head_dim" in config:
        return config | {"head_dim": 32}
    return config | {"num_attention_heads": config["hidden_size"] // 32, "num_key_value_heads": 1}


def says_what_transformers_says(folder: Path, said: list[list[int]]) -> bool:
    """Each token is the likeliest after what precedes it, so the sequences are those of greedy decoding."""
    ids = torch.tensor([prompt + tokens for prompt, tokens in zip(PROMPTS, said, strict=True)])
    first = len(PROMPTS[0])
    likeliest = tiny_models.reference_logits(folder, ids)[:, first - 1 : -1].argmax(-1)
    return torch.equal(likeliest, ids[:, first:])


@pytest.mark.slow
@pytest.mark.usefixtures("groups")
@pytest.mark.parametrize(
    "family", ["qwen2_tied", "llama3", "qwen3_yarn", "qwen3_moe", "glm4_moe", "deepseek_v3", "kimi_k2"]
)
def test_an_updated_engine_says_what_transformers_says(tmp_path, monkeypatch, family):
    monkeypatch.setattr(tiny_models, "raw_config", served_config)
    before, after = (tiny_models.make(family, tmp_path / name, seed=seed) for seed, name in enumerate("ab"))
    engine = EngineProcess(before, tmp_path / "engine.log")
    try:
        model = served_config(family, "v4")
        chunks = build(read_model(model), Layout())
        source = MegatronWeightSource(chunks, model, dtype=torch.float32, place=Place())
        publisher = ShmPublisher(source, engine, Alone())
        first = engine.ask("generate", PROMPTS, TOKENS)
        assert says_what_transformers_says(before, first)
        load_hf(chunks, after)
        publisher.publish(1)
        second = engine.ask("generate", PROMPTS, TOKENS)
        assert second != first and says_what_transformers_says(after, second)
        load_hf(chunks, before)
        publisher.publish(2)
        assert engine.ask("generate", PROMPTS, TOKENS) == first
        publisher.close()
    finally:
        engine.close()

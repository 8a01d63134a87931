"""Every family that vLLM's CPU build runs, updated live from a real Megatron model: it says what transformers says, and
computes what an engine does that starts with the same weights.

vLLM 0.32 on CPU runs INT4 experts ("No WNA16 MoE backend") and Kimi K2.5 (fails while it loads) not at all: what those
would receive is compared byte by byte in test_engine_format. FP8 blocks, which need AMX, are in test_fp8_engines,
Qwen3-VL in test_passthrough.
"""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("megatron_fleet.trainer.megatron")
pytest.importorskip("transformers")
pytest.importorskip("vllm")

import tiny_models
import torch
from engine_process import EngineProcess, Engines
from family_ranks import Layout, build
from local_sender import LocalSender
from safetensors.torch import load_file, save_file
from served_models import served_config
from turns import in_turn

from megatron_fleet.models.hf_config import read_model
from megatron_fleet.weight_sync.registry import make_transport
from megatron_fleet.weights.exchange import Place
from megatron_fleet.weights.shards import load_hf
from megatron_fleet.weights.source import MegatronWeightSource

PROMPTS = [[5, 6, 7, 8, 9, 10], [100, 33, 2, 77, 410, 3], [500, 1, 250, 9, 9, 14]]
TOKENS = 16
FAMILIES = (
    "qwen2_tied", "llama3", "qwen3_yarn", "qwen3_moe", "glm4_moe", "glm4_flash", "deepseek_v3", "moonlight", "kimi_k2",
    "qwen3_5_text", "qwen3_5", "qwen3_5_moe",
)  # fmt: skip


def says_what_transformers_says(folder: Path, said: list[list[int]]) -> bool:
    """Each token is the likeliest after what precedes it, so the sequences are those of greedy decoding."""
    ids = torch.tensor([prompt + tokens for prompt, tokens in zip(PROMPTS, said, strict=True)])
    first = len(PROMPTS[0])
    likeliest = tiny_models.reference_logits(folder, ids)[:, first - 1 : -1].argmax(-1)
    return torch.equal(likeliest, ids[:, first:])


def round_centred(folder: Path) -> Path:
    """Round the norms that only Megatron centres at zero as float32 does there: their last bits cannot come back."""
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        for name in tensors:
            if name.endswith("linear_attn.norm.weight"):
                tensors[name] = ((tensors[name].float() - 1) + 1).to(tensors[name].dtype)
        save_file(tensors, file, metadata={"format": "pt"})
    return folder


@pytest.mark.slow
@pytest.mark.usefixtures("groups")
@pytest.mark.parametrize("family", in_turn(FAMILIES, ("qwen3_moe", "qwen3_5_moe")))
async def test_an_updated_engine_says_what_transformers_says(tmp_path, monkeypatch, family):
    monkeypatch.setattr(tiny_models, "raw_config", served_config)
    before, after = (round_centred(tiny_models.make(family, tmp_path / n, seed=seed)) for seed, n in enumerate("ab"))
    engine = EngineProcess(before, tmp_path / "engine.log", language_model_only=True)
    try:
        model = served_config(family, "v4")
        chunks = build(read_model(model), Layout())
        source = MegatronWeightSource(chunks, model, dtype=torch.float32, place=Place())
        sender, engines, transport = LocalSender(source), Engines(engine), make_transport("shm")
        first = engine.ask("generate", PROMPTS, TOKENS)
        assert says_what_transformers_says(before, first)
        load_hf(chunks, after)
        await transport.sync(sender, engines, 1)
        second = engine.ask("generate", PROMPTS, TOKENS)
        assert second != first and says_what_transformers_says(after, second)
        spoken = [prompt + tokens for prompt, tokens in zip(PROMPTS, second, strict=True)]
        scores = engine.ask("score", spoken)
        load_hf(chunks, before)
        await transport.sync(sender, engines, 2)
        assert engine.ask("generate", PROMPTS, TOKENS) == first and engines.failures == []
        transport.close()
    finally:
        engine.close()
    engine = EngineProcess(after, tmp_path / "fresh.log", language_model_only=True)
    try:
        assert engine.ask("score", spoken) == scores
    finally:
        engine.close()

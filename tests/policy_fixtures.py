"""Small models, batches and configurations shared by the policy's tests and their ranks."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from megatron_fleet.algorithms.datum import Datum
from megatron_fleet.config.schema import Config, ParallelConfig

MICRO_BATCH_TOKENS = 192


def write_config(folder: Path, **changes: Any) -> Path:
    """A tiny Qwen3's ``config.json``; its vocabulary is odd, so that tensor parallelism pads it."""
    hf = {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_hidden_layers": 4,
        "rms_norm_eps": 1e-6,
        "vocab_size": 511,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "initializer_range": 0.06,
        "max_position_embeddings": 1024,
    } | changes
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f"config.{os.getpid()}.part"  # several ranks may write and read the same one
    part.write_text(json.dumps(hf))
    part.replace(folder / "config.json")
    return folder


def make_config(
    model: Path,
    parallel: ParallelConfig | None = None,
    micro_batch_tokens: int = MICRO_BATCH_TOKENS,
    temperature: float = 0.8,
    dtype: str = "float32",
    **optimizer: Any,
) -> Config:
    return Config.model_validate(
        {
            "run": {"name": "test", "out": str(model), "steps": 1, "seed": 5},
            "model": {"path": str(model), "dtype": dtype},
            "parallel": (parallel or ParallelConfig()).model_dump(),
            "policy": {
                "micro_batch_tokens": micro_batch_tokens,
                "logprob_chunk": 50,
                "optimizer": {"lr": 1e-3, "weight_decay": 0.01, "clip_grad": 1.0} | optimizer,
            },
            "rollout": {
                "prompts_per_step": 2,
                "samples_per_prompt": 2,
                "max_context": 128,
                "sampling": {"temperature": temperature, "max_tokens_per_turn": 16, "max_turns": 2},
            },
            "data": {"tasks": "embedded"},
        }
    )


def make_batch(count: int = 12, vocab_size: int = 511, longest: int = 90, seed: int = 0) -> list[Datum]:
    """Sequences with two trained stretches each, advantages of both signs and a token-mean normaliser."""
    rng = np.random.default_rng(seed)
    batch = []
    for _ in range(count):
        n = int(rng.integers(12, longest))
        mask = np.zeros(n, bool)
        mask[n // 4 : n // 2] = True
        mask[-n // 4 :] = True
        batch.append(
            Datum(
                token_ids=rng.integers(0, vocab_size, n).astype(np.int32),
                loss_mask=mask,
                scaled_advantages=mask * np.float32(rng.normal()),
                behaviour_logprobs=np.where(mask, rng.normal(-6, 0.1, n), 0).astype(np.float32),
            )
        )
    trained = sum(int(d.loss_mask.sum()) for d in batch)
    for datum in batch:
        datum.loss_scale = 1 / trained
        datum.scaled_advantages /= trained
    return batch

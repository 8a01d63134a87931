"""A configuration small enough for a test."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_fleet.config.schema import Config


def rollout_config(model: Path, engine: Mapping[str, Any] | None = None, **rollout: Any) -> Config:
    return Config.model_validate(
        {
            "run": {"name": "test", "out": "unused", "steps": 1},
            "model": {"path": str(model), "dtype": "float32"},
            "policy": {"micro_batch_tokens": 4096, "optimizer": {"lr": 1e-3}},
            "data": {"tasks": "embedded"},
            "env": {"start_timeout_s": 300},
            "rollout": {
                "prompts_per_step": 4,
                "samples_per_prompt": 4,
                "max_context": 2047,
                "episodes_in_flight": 32,
                "sampling": {"max_tokens_per_turn": 32, "max_turns": 3},
                "engine": {"kv_cache_bytes": 256 << 20, "max_num_seqs": 128, "start_timeout_s": 1800}
                | dict(engine or {}),
            }
            | rollout,
        }
    )

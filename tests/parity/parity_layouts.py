"""Which models are trained in which layouts, and on what."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_fleet.algorithms.datum import Datum
from megatron_fleet.algorithms.losses import LossInputs, LossResult
from megatron_fleet.config.schema import Config

MODELS = {
    "qwen3": "Qwen3",
    "qwen3_tied": "Qwen3, tied",
    "qwen3_moe": "Qwen3-MoE",
    "deepseek_v3": "DeepSeek-V3",
    "qwen3_5_text": "Qwen3.5, tied",
    "qwen3_5_moe_text": "Qwen3.5-MoE",
}
ATTENTION = ("qwen3", "qwen3_tied", "qwen3_moe", "deepseek_v3")
SPARSE = ("qwen3_moe", "deepseek_v3")
HYBRID, HYBRID_SPARSE = "qwen3_5_text", "qwen3_5_moe_text"
SEEDS = {HYBRID_SPARSE: 2}
"""Seeds of the initial weights where not 0: with most, rounding moves a token to another expert within the steps."""
STEPS = 10
LR, EPS, WEIGHT_DECAY, CLIP, TEMPERATURE, ENTROPY = 1e-3, 1e-5, 0.01, 1.0, 0.8, 0.01


@dataclass(frozen=True)
class Layout:
    """A column of the table.

    Attributes:
        world: processes.
        parallel: keys of ``config.parallel``.
        recompute: ``config.policy.recompute``.
        sequences: number of them in a micro-batch. Four make two micro-batches, which one pipeline can tell apart;
            ranks that share the data, and an interleaved pipeline's steady phase, need four micro-batches.
        models: those it makes sense for; Qwen3.5 where the layout meets its own layers.
    """

    name: str
    world: int = 1
    parallel: dict[str, Any] = field(default_factory=dict)
    recompute: Any = "none"
    sequences: int = 4
    models: tuple[str, ...] = ATTENTION


DENSE = ("qwen3", "qwen3_tied")
SINGLE = Layout("1 process", models=tuple(MODELS))
LAYOUTS = [
    SINGLE,
    Layout("one sequence per micro-batch", sequences=1, models=tuple(MODELS)),
    Layout("recompute full", recompute="full", models=(*ATTENTION, HYBRID)),
    Layout("recompute parts", recompute=["core_attn", "layernorm", "mlp"], models=DENSE),
    Layout("recompute parts, moe", recompute=["core_attn", "moe"], models=SPARSE),
    Layout("recompute up-projections", recompute=["mla_up_proj", "shared_experts"], models=("deepseek_v3",)),
    Layout("TP2", 2, {"tensor": 2, "sequence": False}, models=DENSE),
    Layout("TP2+SP", 2, {"tensor": 2}, models=tuple(MODELS)),
    Layout("PP2", 2, {"pipeline": 2}),
    Layout("PP2 uneven", 2, {"pipeline": 2, "first_stage_layers": 1}),
    Layout("PP2+VPP2", 2, {"pipeline": 2, "virtual": 2}, sequences=2, models=(*ATTENTION, HYBRID)),
    Layout("CP2", 2, {"context": 2}, models=tuple(MODELS)),
    Layout("DP2", 2, {"data": 2}, sequences=2),
    Layout("EP2", 2, {"data": 2, "expert": 2}, sequences=2, models=(*SPARSE, HYBRID_SPARSE)),
    Layout("CP2×EP2", 2, {"context": 2, "expert": 2}, models=SPARSE),
    Layout("TP2×PP2", 4, {"tensor": 2, "pipeline": 2}),
    Layout("TP2×CP2", 4, {"tensor": 2, "context": 2}, models=(*ATTENTION, HYBRID)),
    Layout("CP2×PP2+VPP2", 4, {"context": 2, "pipeline": 2, "virtual": 2}, recompute="full", sequences=2),
    Layout("EP2×PP2", 4, {"data": 2, "pipeline": 2, "expert": 2}, sequences=2, models=SPARSE),
    Layout("EP2×ETP2×TP2", 4, {"tensor": 2, "data": 2, "expert": 2, "expert_tensor": 2}, sequences=2, models=SPARSE),
    Layout("TP2×PP2×CP2", 8, {"tensor": 2, "pipeline": 2, "context": 2}, models=DENSE),
    Layout(
        "TP2×PP2×CP2×EP2",
        8,
        {"tensor": 2, "pipeline": 2, "context": 2, "expert": 2},
        models=(*SPARSE, HYBRID_SPARSE),
    ),
]
CELLS = [(model, layout.name) for layout in LAYOUTS for model in layout.models]
"""Models and names of the layouts in which they are trained."""
CELLS_FILE = "cells.json"
"""In the folder of the runs: those that are wanted."""

MICRO_BATCHES = {1: [[i] for i in range(8)], 2: [[0, 7], [1, 6], [2, 5], [3, 4]], 4: [[0, 3, 4, 7], [1, 2, 5, 6]]}
"""Sequences in a micro-batch → the micro-batches of ``batch``."""


def batch() -> list[Datum]:
    """Eight sequences of 17 to 60 tokens, advantages of both signs, a token-mean normaliser."""
    rng = np.random.default_rng(3)
    data = []
    for n in (60, 51, 45, 38, 33, 26, 20, 17):
        mask = np.zeros(n, bool)
        mask[n // 3 : n // 2] = True
        mask[-n // 4 :] = True
        weights = mask * np.float32(rng.normal())
        data.append(Datum(rng.integers(0, 515, n).astype(np.int32), mask, weights, np.zeros(n, np.float32)))
    trained = sum(int(d.loss_mask.sum()) for d in data)
    for datum in data:
        datum.loss_scale = 1 / trained
        datum.scaled_advantages /= trained
    return data


def scales(datum: Datum) -> np.ndarray:
    """The normaliser of each token, float32 ``[T]``."""
    return (datum.loss_mask * datum.loss_scale).astype(np.float32)


def objective(logprobs: torch.Tensor, entropy: torch.Tensor, mask: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Policy gradient with an entropy bonus: unlike a ratio's, its value moves with every log-prob."""
    return -(weights * logprobs).sum() - ENTROPY * (mask * entropy).sum()


def loss(x: LossInputs) -> LossResult:
    return objective(x.logprobs, x.entropy, x.loss_scale, x.scaled_advantages), {
        "tokens": x.loss_scale.new_tensor(float(len(x.loss_scale)))
    }


def config(model: Path, layout: Layout) -> Config:
    return Config.model_validate(
        {
            "run": {"name": "parity", "out": str(model), "steps": STEPS, "seed": 5},
            "model": {"path": str(model), "dtype": "float32"},
            "parallel": layout.parallel,
            "policy": {
                "micro_batch_tokens": 192,
                "logprob_chunk": 50,
                "recompute": layout.recompute,
                "optimizer": {"lr": LR, "eps": EPS, "weight_decay": WEIGHT_DECAY, "clip_grad": CLIP},
            },
            "rollout": {
                "prompts_per_step": 2,
                "samples_per_prompt": 2,
                "max_context": 64,
                "sampling": {"temperature": TEMPERATURE, "max_tokens_per_turn": 16, "max_turns": 2},
            },
            "data": {"tasks": "embedded"},
        }
    )

"""Mixtures of experts with a recorded routing: configurations, sequences, and their training by ``transformers``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tiny_models import reference_model

from megatron_fleet.algorithms.datum import Datum
from megatron_fleet.algorithms.losses import LossInputs
from megatron_fleet.config.schema import Config

MODELS = {"qwen3_moe": 3, "deepseek_v3": 2}
"""Model → experts per token."""
LAYERS, EXPERTS, TEMPERATURE, LR = 4, 8, 0.8, 1e-3
MICRO_BATCHES = [[0, 5], [1, 4], [2], [3]]


def config(
    model: Path, parallel: dict[str, int] | None = None, recompute: Any = "none", replay: bool = True, **router: Any
) -> Config:
    return Config.model_validate(
        {
            "run": {"name": "routing", "out": str(model), "steps": 1, "seed": 5},
            "model": {"path": str(model), "dtype": "float32"},
            "parallel": parallel or {},
            "policy": {
                "micro_batch_tokens": 96,
                "logprob_chunk": 50,
                "recompute": recompute,
                "optimizer": {"lr": LR, "eps": 1e-4, "clip_grad": 1.0},
                "router": router,
            },
            "rollout": {
                "prompts_per_step": 2,
                "samples_per_prompt": 2,
                "max_context": 64,
                "sampling": {"temperature": TEMPERATURE, "max_tokens_per_turn": 16, "max_turns": 2},
                "engine": {"routing_replay": replay},
            },
            "data": {"tasks": "embedded"},
        }
    )


def sequences() -> list[Datum]:
    """Six sequences without routing, of 13 to 47 tokens."""
    rng = np.random.default_rng(3)
    data = []
    for n in (47, 38, 29, 33, 13, 20):
        mask, zeros = np.arange(n) >= n // 3, np.zeros(n, np.float32)
        data.append(Datum(rng.integers(0, 515, n).astype(np.int32), mask, mask * np.float32(rng.normal()), zeros))
    trained = sum(int(d.loss_mask.sum()) for d in data)
    for datum in data:
        datum.scaled_advantages /= trained
    return data


def record_anything(data: list[Datum], choices: int, whole: bool = False) -> None:
    """Give sequences random experts; not all of them and not for every token, unless ``whole``."""
    rng = np.random.default_rng(7)
    for index, datum in enumerate(data):
        n = len(datum)
        experts = rng.random((n, LAYERS, EXPERTS)).argsort(-1)[..., :choices].astype(np.uint8)
        if not whole:
            experts[-1] = 0  # the last token was no input
            experts[n // 2 : n // 2 + index] = 0  # nor did the engine tell of these
        datum.extras["routing"] = experts
    if not whole:
        del data[2].extras["routing"]


def loss(x: LossInputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Its value moves with every log-prob, unlike that of a ratio."""
    return -(x.scaled_advantages * x.logprobs).sum(), {}


class Reference:
    """A model of ``transformers`` whose routers take given experts, one sequence at a time.

    Attributes:
        disagreed: experts given that a router itself would not have taken.
    """

    def __init__(self, folder: Path) -> None:
        self.model = reference_model(folder)
        self.disagreed = 0
        self._routing: torch.Tensor | None = None
        for number, layer in enumerate(self.model.model.layers):
            if hasattr(layer.mlp, "gate"):
                self._replace(number, layer.mlp.gate)

    def _replace(self, number: int, gate: Any) -> None:
        choose = gate.forward

        def forward(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            live = choose(hidden)[2]
            logits = F.linear(hidden.reshape(-1, hidden.shape[-1]), gate.weight)
            experts = live.clone()
            for t in range(len(live) if self._routing is not None else 0):
                given = self._routing[t, number].tolist()
                if len(set(given)) > 1:
                    experts[t] = torch.tensor(given)
                    self.disagreed += len(set(given) - set(live[t].tolist()))
            if hasattr(gate, "e_score_correction_bias"):
                chosen = logits.sigmoid().gather(1, experts)
                return logits, gate.routed_scaling_factor * chosen / chosen.sum(1, keepdim=True), experts
            return logits, logits.gather(1, experts).softmax(1), experts

        gate.forward = forward

    def logprobs(self, datum: Datum) -> torch.Tensor:
        """``[T]``, differentiable; 0 where nothing is trained."""
        experts = datum.extras.get("routing")
        self._routing = None if experts is None else torch.from_numpy(experts.astype(np.int64))
        ids = torch.from_numpy(datum.token_ids).long()
        logp = (self.model(ids[None]).logits[0] / TEMPERATURE).log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0]
        return torch.cat([torch.zeros(1), logp * torch.from_numpy(datum.loss_mask[1:])])

    def train(self, data: list[Datum]) -> float:
        """Gradients of the loss over all sequences; its value."""
        total = sum(-(torch.from_numpy(d.scaled_advantages) * self.logprobs(d)).sum() for d in data)
        total.backward()
        return float(total.detach())

"""What a sequence costs to train, from the sizes of the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_fleet.models.model import Model


@dataclass(frozen=True, slots=True)
class SequenceCost:
    """FLOPs of a forward pass; a multiplication and an addition are two. A backward pass takes twice as many.

    Counted are the matrix products of the layers, causal attention and the head; not norms, activations, the vision
    tower, prediction layers (the policy trains none).

    Attributes:
        token: per token, in all layers together.
        pair: per query and key that it sees, in all layers together.
        prediction: per trained position, in the head: log-probs are computed nowhere else.
    """

    token: float
    pair: float
    prediction: float

    @classmethod
    def of(cls, model: Model) -> SequenceCost:
        """The cost in this model; of its experts, those that a token takes."""
        with_experts = sum(map(model.has_experts, range(model.layers)))
        dense = (model.layers - with_experts) * 6 * model.hidden * model.ffn
        projections, pair = _latent(model) if model.latent else _grouped(model)
        return cls(
            token=model.layers * projections + dense + with_experts * _experts(model),
            pair=model.layers * pair,
            prediction=2 * model.hidden * model.vocab,
        )

    def __call__(self, tokens: Sequence[int], trained: Sequence[int]) -> np.ndarray:
        """FLOPs float64 ``[N]`` of sequences with so many tokens, of which so many are trained."""
        length = np.asarray(tokens, np.float64)
        return self.token * length + self.pair * length * (length + 1) / 2 + self.prediction * np.asarray(trained)


def _grouped(model: Model) -> tuple[int, int]:
    """Grouped-query attention of a layer: projections of a token, scores and values of a pair."""
    head, groups = model.head or model.hidden // model.heads, model.groups or model.heads
    return 4 * model.hidden * head * (model.heads + groups), 4 * model.heads * head


def _latent(model: Model) -> tuple[int, int]:
    """The same of multi-head latent attention, in the form that training computes: keys and values per head."""
    kv_lora, nope, rotated, value = (x or 0 for x in (model.kv_lora, model.nope, model.rotated, model.value))
    query = model.heads * (nope + rotated)
    queries = model.hidden * query if model.q_lora is None else (model.hidden + query) * model.q_lora
    keys = model.hidden * (kv_lora + rotated) + kv_lora * model.heads * (nope + value)
    return 2 * (queries + keys + model.heads * value * model.hidden), 2 * (query + model.heads * value)


def _experts(model: Model) -> int:
    """Router, chosen and shared experts of a layer."""
    return 2 * model.hidden * (model.experts + 3 * (model.experts_per_token * model.expert_ffn + model.shared_ffn))

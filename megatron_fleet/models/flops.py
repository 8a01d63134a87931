"""Training cost of a sequence in FLOPs, from the model's dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from megatron_fleet.models.model import Model


@dataclass(frozen=True, slots=True)
class SequenceCost:
    """FLOPs of a forward pass; a multiply-add counts as two. A backward pass takes twice as many.

    Includes the matrix products of the layers, causal attention and the head. Excludes norms, activations, the vision
    tower and MTP layers (the policy trains none).

    Attributes:
        token: FLOPs per token, summed over all layers.
        pair: FLOPs per attended query-key pair, summed over all layers.
        prediction: FLOPs of the head per trained position: log-probs are computed nowhere else.
    """

    token: float
    pair: float
    prediction: float

    @classmethod
    @lru_cache(maxsize=16)
    def of(cls, model: Model) -> SequenceCost:
        """Build the cost of a model; counts only the experts active for a token."""
        layers = [cls.of_layer(model, layer) for layer in range(model.layers)]
        return cls(
            token=sum(layer.token for layer in layers),
            pair=sum(layer.pair for layer in layers),
            prediction=2 * model.hidden * model.vocab,
        )

    @classmethod
    def of_layer(cls, model: Model, layer: int) -> SequenceCost:
        """Build the cost of one layer, counted from 0."""
        projections, pair = _latent(model) if model.latent else _grouped(model)
        if model.has_mixer(layer) and model.mixer is not None:
            projections, pair = model.mixer.flops(model.hidden), 0
        feed_forward = _experts(model) if model.has_experts(layer) else 6 * model.hidden * model.ffn
        return cls(token=projections + feed_forward, pair=pair, prediction=0)

    def __call__(self, tokens: Sequence[int], trained: Sequence[int]) -> np.ndarray:
        """Forward FLOPs, float64 ``[N]``, of sequences with the given numbers of tokens and of trained tokens."""
        length = np.asarray(tokens, np.float64)
        return self.token * length + self.pair * length * (length + 1) / 2 + self.prediction * np.asarray(trained)


def _grouped(model: Model) -> tuple[int, int]:
    """Grouped-query attention of one layer: projections per token, scores and values per pair."""
    head, groups = model.head or model.hidden // model.heads, model.groups or model.heads
    queries = 2 * model.heads if model.output_gate else model.heads
    return 2 * model.hidden * head * (queries + model.heads + 2 * groups), 4 * model.heads * head


def _latent(model: Model) -> tuple[int, int]:
    """Latent attention of one layer, in the form used for training: keys and values expanded per head."""
    kv_lora, nope, rotated, value = (x or 0 for x in (model.kv_lora, model.nope, model.rotated, model.value))
    query = model.heads * (nope + rotated)
    queries = model.hidden * query if model.q_lora is None else (model.hidden + query) * model.q_lora
    keys = model.hidden * (kv_lora + rotated) + kv_lora * model.heads * (nope + value)
    return 2 * (queries + keys + model.heads * value * model.hidden), 2 * (query + model.heads * value)


def _experts(model: Model) -> int:
    """Router, selected experts and shared experts of one layer."""
    return 2 * model.hidden * (model.experts + 3 * (model.experts_per_token * model.expert_ffn + model.shared_ffn))

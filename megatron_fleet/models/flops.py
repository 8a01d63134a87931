"""Training cost of a sequence in FLOPs, from the model's dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_fleet.models.model import Model

LINEAR_CHUNK = 64
"""Tokens to a chunk of a Gated DeltaNet, in all implementations."""


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
    def of(cls, model: Model) -> SequenceCost:
        """Build the cost of a model; counts only the experts active for a token."""
        with_experts = sum(map(model.has_experts, range(model.layers)))
        dense = (model.layers - with_experts) * 6 * model.hidden * model.ffn
        linear = sum(map(model.is_linear, range(model.layers)))
        projections, pair = _latent(model) if model.latent else _grouped(model)
        mixing = (model.layers - linear) * projections + (linear * _gated_delta_net(model) if linear else 0)
        return cls(
            token=mixing + dense + with_experts * _experts(model),
            pair=(model.layers - linear) * pair,
            prediction=2 * model.hidden * model.vocab,
        )

    def __call__(self, tokens: Sequence[int], trained: Sequence[int]) -> np.ndarray:
        """Forward FLOPs, float64 ``[N]``, of sequences with the given numbers of tokens and of trained tokens."""
        length = np.asarray(tokens, np.float64)
        return self.token * length + self.pair * length * (length + 1) / 2 + self.prediction * np.asarray(trained)


def _grouped(model: Model) -> tuple[int, int]:
    """Grouped-query attention of one layer: projections per token, scores and values per pair."""
    head, groups = model.head or model.hidden // model.heads, model.groups or model.heads
    queries = 2 * model.heads if model.output_gate else model.heads
    return 2 * model.hidden * head * (queries + model.heads + 2 * groups), 4 * model.heads * head


def _gated_delta_net(model: Model) -> int:
    """A Gated DeltaNet per token: projections, convolution and the rule in its chunked form.

    A chunk of C tokens costs each of them, per value head, products with the state (write, correct, read: K·V each)
    and with half of the chunk's other tokens (k·k and q·k: K each; solved and attended: K + V and V each).
    """
    heads, key_head, value_head = (
        model.linear_value_heads or 0,
        model.linear_key_head or 0,
        model.linear_value_head or 0,
    )
    keys, values = (model.linear_key_heads or 0) * key_head, heads * value_head
    projections = model.hidden * (2 * keys + 2 * values + 2 * heads + values)
    convolution = (model.linear_convolution or 0) * (2 * keys + values)
    rule = heads * (3 * key_head * value_head + LINEAR_CHUNK // 2 * (3 * key_head + 2 * value_head))
    return 2 * (projections + convolution + rule)


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

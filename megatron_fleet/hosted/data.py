"""Our training sequences as the service takes them, and the log-probs that it returns.

Index t of a `Datum` is about the prediction of token t. The service predicts target i from the inputs up to i, so
inputs are the tokens without the last one, targets those without the first one, and everything else moves with them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from tinker import types

from megatron_fleet.algorithms.datum import Datum
from megatron_fleet.hosted.service import ServiceLost


def to_service(datum: Datum, **inputs: np.ndarray) -> types.Datum:
    """Args: ``inputs``: further inputs of the loss by name, ``[T]`` each, sent as float32."""
    tensors: dict[str, np.ndarray] = {"target_tokens": datum.token_ids[1:].astype(np.int64)}
    tensors |= {name: np.asarray(values, np.float32)[1:] for name, values in inputs.items()}
    return types.Datum(
        model_input=types.ModelInput.from_ints(datum.token_ids[:-1].tolist()),
        loss_fn_inputs={name: types.TensorData.from_numpy(values) for name, values in tensors.items()},
    )


def untrained(data: Sequence[Datum]) -> list[types.Datum]:
    """Data of a forward pass: all weights are 0."""
    return [to_service(datum, weights=np.zeros(len(datum))) for datum in data]


def weighted(data: Sequence[Datum], weights: np.ndarray) -> list[types.Datum]:
    """Data whose ``cross_entropy`` is −Σ w·log π.

    Args:
        weights: of all trained tokens of ``data``, in their order.
    """
    counts = [int(np.count_nonzero(datum.loss_mask)) for datum in data]
    parts = np.split(weights, np.cumsum(counts)[:-1]) if data else []
    return [to_service(datum, weights=at_trained(datum, part)) for datum, part in zip(data, parts, strict=True)]


def at_trained(datum: Datum, values: np.ndarray) -> np.ndarray:
    """Values of the trained tokens of a Datum at their places, float32 ``[T]``; 0 elsewhere."""
    placed = np.zeros(len(datum), np.float32)
    placed[datum.loss_mask] = values
    return placed


def logprobs_of(data: Sequence[Datum], outputs: Sequence[Mapping[str, types.TensorData]]) -> list[np.ndarray]:
    """Log-probs, float32 ``[T]`` for each Datum, 0 where ``loss_mask`` is false.

    Raises:
        ServiceLost: the service returned other numbers of values.
    """
    if len(outputs) != len(data):
        raise ServiceLost(f"the service returned log-probs of {len(outputs)} sequences for {len(data)}")
    found = []
    for datum, output in zip(data, outputs, strict=True):
        values = output["logprobs"].to_numpy() if "logprobs" in output else np.zeros(0)
        if values.shape != (len(datum) - 1,):
            raise ServiceLost(f"the service returned log-probs of shape {values.shape} for {len(datum) - 1} tokens")
        found.append(np.where(datum.loss_mask, np.concatenate([[0.0], values]), 0.0).astype(np.float32))
    return found

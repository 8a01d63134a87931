"""Comparison of engines and trainer after a weight sync, by the log-probs of a few fixed tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_fleet.algorithms.datum import Datum
from megatron_fleet.rollout.requests import RolloutFailed

SEQUENCES, TOKENS = 4, 32


def probe_data(vocab: int, longest: int) -> list[Datum]:
    """Sequences of the probe, the same in every run; all positions except the first are scored.

    Args:
        vocab: size of the vocabulary.
        longest: most tokens of all sequences together.
    """
    rng = np.random.default_rng(0)
    length = min(TOKENS, longest // SEQUENCES)
    mask = np.ones(length, np.float32)
    mask[0] = 0
    zeros = np.zeros(length, np.float32)
    return [Datum(rng.integers(0, vocab, length).astype(np.int32), mask, zeros, zeros) for _ in range(SEQUENCES)]


def compare(
    expected: Sequence[np.ndarray], engines: Sequence[Sequence[np.ndarray]], tolerance: float, version: int
) -> float:
    """Return the largest mean absolute difference of log-probs over the engines, in nats.

    Args:
        expected: the trainer's log-probs, float32 ``[T]`` each.
        engines: each engine's log-probs of the same sequences.
        tolerance: largest mean that is allowed.

    Raises:
        RolloutFailed: the tolerance is exceeded, or a mean is not a number.
    """
    wanted = np.concatenate([x[1:] for x in expected])
    means = [float(np.abs(np.concatenate([x[1:] for x in found]) - wanted).mean()) for found in engines]
    for index, mean in enumerate(means):
        if not mean <= tolerance:
            raise RolloutFailed(
                f"engine {index} differs from the trainer after the update to version {version}: log-probs by "
                f"{mean:.3g} nats on average, rollout.engine.probe_tolerance={tolerance:g} allowed; raise it if the "
                f"engine computes in a lower precision, else the update went wrong."
            )
    return max(means)

"""Which checkpoints are kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def kept_besides(steps: Sequence[int], every: int, scores: Mapping[int, float]) -> set[int]:
    """Steps whose checkpoints are kept besides the newest ones.

    Args:
        every: multiples of this are kept; 0: none.
        scores: by step; of ``steps``, the one with the highest score is kept, of equal ones the newest.
    """
    best = max((step for step in steps if step in scores), key=lambda step: (scores[step], step), default=None)
    return {step for step in steps if (every and step % every == 0) or step == best}

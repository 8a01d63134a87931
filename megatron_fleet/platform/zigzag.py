"""Assignment of a packed micro-batch's tokens to context-parallel ranks.

Every sequence is cut into 2 × ranks parts; rank r gets part r and its mirror image, part 2 × ranks − 1 − r. Under a
causal mask this balances the number of attended keys over the ranks. Transformer Engine uses the same layout.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def local_parts(lengths: Sequence[int], ranks: int, rank: int) -> list[tuple[int, int, int]]:
    """Parts of a rank as ``(start of their sequence, first token, end)``, indices into the micro-batch, in local order.

    Args:
        lengths: tokens of each sequence of the micro-batch, multiples of 2 × ``ranks``.

    Raises:
        ValueError: a length is not such a multiple.
    """
    parts, start = [], 0
    for length in lengths:
        if length % (2 * ranks):
            raise ValueError(f"a sequence of {length} tokens cannot be cut into {2 * ranks} parts")
        size = length // (2 * ranks)
        for part in (rank, 2 * ranks - 1 - rank):
            parts.append((start, start + part * size, start + (part + 1) * size))
        start += length
    return parts


def local_tokens(lengths: Sequence[int], ranks: int, rank: int) -> np.ndarray:
    """Indices into the micro-batch of a rank's tokens, in local order: int64 ``[P / ranks]``."""
    pieces = [np.arange(first, end) for _, first, end in local_parts(lengths, ranks, rank)]
    return np.concatenate(pieces) if pieces else np.zeros(0, np.int64)

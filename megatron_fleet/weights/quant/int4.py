"""INT4 weights of compressed-tensors' ``pack-quantized`` format: symmetric, one BF16 scale per 32 columns of a row.

A weight is ``bfloat16(q * scale)`` with q in -8..7. Eight codes q + 8 are packed in one int32, column 8k+i in bits 4i
and up. Arrays: packed int32 ``[rows, cols / 8]``; scales uint16 (BF16 bits) ``[rows, cols / 32]``; weights uint16 (BF16
bits) ``[rows, cols]``. Slicing a weight slices all three: any rows, columns at multiples of 32. The columns of a row
must be contiguous.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from megatron_fleet.weights.quant import _kernels
from megatron_fleet.weights.quant.fp8 import span, target

GROUP = _kernels.GROUP
CODES_PER_WORD = 8

RECOVERED, NEEDS_SCALE, NEEDS_CODES = 0, 1, 2
"""Result of ``recovery``: data to keep of a group, besides its weights, to reproduce it bit for bit."""


def dequantize(packed: NDArray[np.int32], scales: NDArray[np.uint16], out: NDArray[np.uint16]) -> None:
    """Write the weights to ``out``. Raises ValueError if shapes or dtypes do not match."""
    rows, groups = scales.shape
    codes, codes_step = span("packed", packed, np.int32, (rows, groups * GROUP // CODES_PER_WORD))
    source, source_step = span("scales", scales, np.uint16, (rows, groups))
    pairs, pairs_step = target("out", out, np.uint16, (rows, groups * GROUP))
    _check_pairs("out", pairs_step)
    _kernels.int4_to_bf16(
        codes.view(np.uint8), codes_step * 4, source, source_step, pairs.view(np.uint32), pairs_step // 2, rows, groups
    )


def quantize(weights: NDArray[np.uint16], scales: NDArray[np.uint16], out: NDArray[np.int32]) -> None:
    """Write the codes ``clamp(round(float32(weights) / scale), -8, 7)``, ties to even, to ``out``.

    Where a scale is 0 the weight itself is rounded; where the quotient is NaN the code is 0.

    Raises:
        ValueError: shapes or dtypes do not match.
    """
    pairs, pairs_step, rows, groups = _pairs(weights)
    source, source_step = span("scales", scales, np.uint16, (rows, groups))
    codes, codes_step = target("out", out, np.int32, (rows, groups * GROUP // CODES_PER_WORD))
    _kernels.bf16_to_int4(pairs, pairs_step, source, source_step, codes.view(np.uint8), codes_step * 4, rows, groups)


def group_scales(weights: NDArray[np.uint16]) -> NDArray[np.uint16]:
    """Scales by the declared rule (that of Kimi's quantisation-aware training): largest magnitude / 7, rounded to BF16.

    A group of zeros has scale 1; a quotient that would round to 0 becomes the smallest BF16 number. A group with NaN or
    infinity has scale NaN: check where the tensor's name is known.
    """
    pairs, pairs_step, rows, groups = _pairs(weights)
    scales = np.empty((rows, groups), np.uint16)
    _kernels.group_rule(pairs, pairs_step, scales, rows, groups)
    return scales


def choose_scales(
    weights: NDArray[np.uint16], hint: NDArray[np.uint16] | None = None
) -> tuple[NDArray[np.uint16], NDArray[np.bool_]]:
    """Per group, the first of: hint, scale derived from the weights, declared rule; and which groups are exact.

    The first two are used only if exact: ``dequantize`` of ``quantize`` gives the same values (zeros of either sign are
    equal). A scale is found whenever a positive BF16 scale exists under which the group is exact and none of its values
    overflows, whichever rule made it. If there are several, it need not be the original one; ``recovery`` reports where
    it is not.
    """
    pairs, pairs_step, rows, groups = _pairs(weights)
    given, given_step = np.empty(0, np.uint16), 0
    given.flags.writeable = False
    if hint is not None:
        given, given_step = span("hint", hint, np.uint16, (rows, groups))
    scales = np.empty((rows, groups), np.uint16)
    exact = np.empty((rows, groups), np.bool_)
    _kernels.choose_group_scales(pairs, pairs_step, given, given_step, scales, exact, rows, groups)
    return scales, exact


def recovery(packed: NDArray[np.int32], scales: NDArray[np.uint16]) -> NDArray[np.uint8]:
    """Information lost by dequantising, per group ``[rows, cols / 32]``.

    ``RECOVERED``: ``choose_scales`` without hint and ``quantize`` reproduce this scale and these codes.
    ``NEEDS_SCALE``: they do with this scale as the hint (all zeros, codes with a common factor and the like).
    ``NEEDS_CODES``: not even then (a scale of 0 or NaN, values that overflow).
    """
    rows, groups = scales.shape
    codes, codes_step = span("packed", packed, np.int32, (rows, groups * GROUP // CODES_PER_WORD))
    source, source_step = span("scales", scales, np.uint16, (rows, groups))
    out = np.empty((rows, groups), np.uint8)
    _kernels.int4_recovery(codes.view(np.uint8), codes_step * 4, source, source_step, out, rows, groups)
    return out


def _pairs(weights: NDArray[np.uint16]) -> tuple[NDArray[np.uint32], int, int, int]:
    """Weights in pairs, their row stride in pairs, rows, groups per row."""
    rows, cols = weights.shape
    if cols % GROUP:
        raise ValueError(f"weights: {cols} columns are not a multiple of {GROUP}.")
    words, step = span("weights", weights, np.uint16, (rows, cols))
    _check_pairs("weights", step)
    return words.view(np.uint32), step // 2, rows, cols // GROUP


def _check_pairs(name: str, step: int) -> None:
    if step % 2:
        raise ValueError(f"{name}: rows begin {step} elements apart; the distance must be even.")

"""FP8 E4M3 weights with one float32 scale per 128×128 block (``weight_scale_inv`` of DeepSeek's format).

A weight is ``bfloat16(float32(code) * scale)``, computed in float32. Blocks at the lower and right edge are smaller.
Arrays: codes uint8 ``[rows, cols]``; BF16 bits uint16 ``[rows, cols]``; scales float32 ``[row blocks, column blocks]``.
Matrices may be slices of larger ones as long as the columns of a row are contiguous.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from megatron_fleet.weights.quant import _kernels

BLOCK = _kernels.BLOCK
MAX = 448.0
"""Largest finite E4M3 number."""


def scale_shape(rows: int, cols: int) -> tuple[int, int]:
    """Shape of the scales of a ``[rows, cols]`` weight."""
    return -(-rows // BLOCK), -(-cols // BLOCK)


def dequantize(
    codes: NDArray[np.uint8],
    scales: NDArray[np.float32],
    out: NDArray[Any],
    *,
    first_row: int = 0,
    first_col: int = 0,
) -> None:
    """Write the weights of ``codes`` to ``out``: BF16 if it is uint16, the unrounded products if it is float32.

    Args:
        codes: any slice of a weight.
        scales: scales of the whole weight.
        first_row, first_col: start of the slice in the weight; need not be block-aligned.

    Raises:
        ValueError: shapes or dtypes do not match, or the scales do not cover the codes.
    """
    rows, cols = codes.shape
    rounded = out.dtype != np.float32
    kernel = _kernels.fp8_to_bf16 if rounded else _kernels.fp8_to_float
    source, source_step = span("codes", codes, np.uint8, (rows, cols))
    to, to_step = target("out", out, np.uint16 if rounded else np.float32, (rows, cols))
    scales = _reaching(scales, first_row, first_row + rows, first_col, first_col + cols)
    kernel(source, source_step, scales, first_row, first_col, to, to_step, rows, cols)


def quantize(
    weights: NDArray[np.uint16],
    scales: NDArray[np.float32],
    out: NDArray[np.uint8],
    *,
    first_row: int = 0,
    first_col: int = 0,
) -> None:
    """Write the codes nearest to ``float32(weights) / scale`` to ``out``, ties to even. Arguments as for `dequantize`.

    Values beyond 448 saturate to 448 (torch releases differ here: 448 or NaN). A NaN stays NaN. Where a scale is 0 the
    weight itself is rounded.

    Raises:
        ValueError: shapes or dtypes do not match, or the scales do not cover the weights.
    """
    rows, cols = weights.shape
    source, source_step = span("weights", weights, np.uint16, (rows, cols))
    to, to_step = target("out", out, np.uint8, (rows, cols))
    scales = _reaching(scales, first_row, first_row + rows, first_col, first_col + cols)
    _kernels.bf16_to_fp8(source, source_step, scales, first_row, first_col, to, to_step, rows, cols)


def block_scales(weights: NDArray[np.uint16], *, power_of_two: bool = False) -> NDArray[np.float32]:
    """Scales by the declared rule: largest magnitude / 448, or the next power of two at or above it.

    A block of zeros has scale 1. A block with NaN or infinity has scale NaN: check ``np.isfinite`` where the tensor's
    name is known.

    Args:
        weights: whole rows of blocks, all columns.
    """
    rows, cols = weights.shape
    source, source_step = span("weights", weights, np.uint16, (rows, cols))
    absmax = np.zeros(scale_shape(rows, cols), np.uint16)
    _kernels.block_absmax(source, source_step, rows, cols, absmax)
    scales = (absmax.astype(np.uint32) << 16).view(np.float32) / np.float32(MAX)
    if power_of_two:
        scales = ((scales.view(np.uint32) + 0x7FFFFF) & 0xFF800000).view(np.float32)
    scales[absmax == 0] = 1
    scales[absmax >= 0x7F80] = np.nan
    return scales


def choose_scales(
    weights: NDArray[np.uint16], hint: NDArray[np.float32], *, power_of_two: bool = False
) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """The hint for every block that it represents exactly, ``block_scales`` for the rest; and which blocks are exact.

    Exact means that ``dequantize`` of ``quantize`` gives the same bits (or NaN for NaN). Unlike INT4's, these scales
    cannot be recovered from the weights: their low bits leave no trace in BF16.

    Args:
        weights: whole rows of blocks, all columns.
        hint: the scales of these blocks.
    """
    rows, cols = weights.shape
    if hint.shape != scale_shape(rows, cols):
        raise ValueError(f"hint: expected {list(scale_shape(rows, cols))}, got {list(hint.shape)}.")
    source, source_step = span("weights", weights, np.uint16, (rows, cols))
    hint = _reaching(hint, 0, rows, 0, cols)
    exact = np.ones(hint.shape, np.bool_)
    _kernels.blocks_hold(source, source_step, rows, cols, hint, exact)
    if exact.all():
        return hint.copy(), exact
    return np.where(exact, hint, block_scales(weights, power_of_two=power_of_two)), exact


def _reaching(
    scales: NDArray[np.float32], first_row: int, last_row: int, first_col: int, last_col: int
) -> NDArray[np.float32]:
    """Scales in the kernels' form, checked to cover the requested rows and columns."""
    needed = scale_shape(last_row, last_col)
    if scales.dtype != np.float32 or scales.ndim != 2:
        raise ValueError(f"scales: expected float32 with two axes, got {scales.dtype} {list(scales.shape)}.")
    if min(first_row, first_col) < 0 or scales.shape[0] < needed[0] or scales.shape[1] < needed[1]:
        rows, cols = f"rows {first_row}..{last_row}", f"columns {first_col}..{last_col}"
        raise ValueError(f"scales: {list(scales.shape)} blocks of {BLOCK} by {BLOCK} do not hold {rows}, {cols}.")
    view = np.ascontiguousarray(scales).view()
    view.flags.writeable = False
    return view


def span(name: str, array: NDArray[Any], dtype: DTypeLike, shape: tuple[int, int]) -> tuple[NDArray[Any], int]:
    """The memory from the first to the last element of a matrix, read-only, and its row stride in elements.

    The loops do not check bounds, so invalid arguments must be caught here. Read-only because numba compiles once per
    kind of array, and memory-mapped files are read-only.

    Raises:
        ValueError: another dtype or shape, or non-contiguous columns.
    """
    if array.dtype != dtype or array.shape != shape:
        expected = f"{np.dtype(dtype)} {list(shape)}"
        raise ValueError(f"{name}: expected {expected}, got {array.dtype} {list(array.shape)}.")
    rows, cols = shape
    if array.size == 0:
        return np.empty(0, dtype), cols
    step = array.strides[0] // array.itemsize if rows > 1 else cols
    if (cols > 1 and array.strides[1] != array.itemsize) or (rows > 1 and array.strides[0] % array.itemsize):
        raise ValueError(f"{name}: the columns of a row must lie next to each other; strides are {array.strides}.")
    if step < cols:
        raise ValueError(f"{name}: rows must not overlap or run backwards; strides are {array.strides}.")
    length = (rows - 1) * step + cols
    return np.lib.stride_tricks.as_strided(array, (length,), (array.itemsize,), writeable=False), step


def target(name: str, array: NDArray[Any], dtype: DTypeLike, shape: tuple[int, int]) -> tuple[NDArray[Any], int]:
    """``span`` of a matrix to write to. Also raises ValueError if it is read-only."""
    if not array.flags.writeable:
        raise ValueError(f"{name} is read-only.")
    flat, step = span(name, array, dtype, shape)
    return np.lib.stride_tricks.as_strided(array, flat.shape, flat.strides, writeable=True), step

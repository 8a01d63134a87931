"""Matrices in the form the compiled loops take: a flat array and the row stride in elements."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray


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
        raise ValueError(f"{name}: is read-only.")
    flat, step = span(name, array, dtype, shape)
    return np.lib.stride_tricks.as_strided(array, flat.shape, flat.strides, writeable=True), step

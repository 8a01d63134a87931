"""Conversions between stored float types. numpy only; it lacks bfloat16, so 16-bit floats are handled as raw bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_fleet.weights.hf_folder import ITEM_BYTES

Floats = npt.NDArray[np.float32] | npt.NDArray[np.uint16]
"""float32 values, or the bits of bfloat16 or float16 values."""

FLOATS = ("F32", "BF16", "F16")
_NUMPY: dict[str, npt.DTypeLike] = {
    "F32": np.float32,
    "I32": np.int32,
    "I64": np.int64,
    **dict.fromkeys(("BF16", "F16"), np.uint16),
}


def numpy_type(dtype: str) -> npt.DTypeLike:
    """Array dtype for values of a stored type; bytes if the values are never interpreted."""
    return _NUMPY.get(dtype, np.dtype(f"u{ITEM_BYTES[dtype]}"))


def cast(values: npt.NDArray[Any], source: str, target: str) -> npt.NDArray[Any]:
    """Cast values of type ``source`` to ``target``, rounding to nearest even; returns the same array if they are equal.

    Values too large for ``target`` become infinite, as in torch.

    Args:
        source, target: safetensors names from ``FLOATS``.
    """
    if source == target:
        return values
    wide = _widen(values, source)
    if target == "F32":
        return wide
    if target == "F16":
        with np.errstate(over="ignore"):
            return wide.astype(np.float16).view(np.uint16)
    return _to_bfloat16(wide)


def cast_up(values: npt.NDArray[np.float32], target: str) -> npt.NDArray[Any]:
    """Cast positive numbers to the smallest value of ``target`` (one of ``FLOATS``) that is not below each of them.

    A NaN stays one; what is above the largest value of ``target`` becomes infinite.
    """
    bits = cast(values, "F32", target)
    return bits if target == "F32" else np.where(_widen(bits, target) < values, bits + np.uint16(1), bits)


def _widen(values: npt.NDArray[Any], source: str) -> npt.NDArray[np.float32]:
    if source == "BF16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    if source == "F16":
        return values.view(np.float16).astype(np.float32)
    return values


def _to_bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    # Rounding would turn a NaN with a small payload into infinity.
    return np.where(np.isnan(values), (bits >> 16) | 0x40, rounded).astype(np.uint16)


def widest(dtypes: list[str]) -> str:
    """A type that holds the values of all of ``dtypes`` exactly."""
    return dtypes[0] if len(set(dtypes)) == 1 else "F32"

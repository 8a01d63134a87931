"""Element types by their safetensors names, with their names in torch's files."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Dtype:
    """One element type.

    Attributes:
        name: safetensors name (``BF16``).
        nbytes: size of one element.
        torch: attribute of the ``torch`` module.
        storage: typed storage class in ``torch``; ``None`` for dtypes newer than those classes.
    """

    name: str
    nbytes: int
    torch: str
    storage: str | None


DTYPES = {
    dtype.name: dtype
    for dtype in (
        Dtype("BOOL", 1, "bool", "BoolStorage"),
        Dtype("U8", 1, "uint8", "ByteStorage"),
        Dtype("I8", 1, "int8", "CharStorage"),
        Dtype("F8_E4M3", 1, "float8_e4m3fn", None),
        Dtype("F8_E5M2", 1, "float8_e5m2", None),
        Dtype("F8_E8M0", 1, "float8_e8m0fnu", None),
        Dtype("I16", 2, "int16", "ShortStorage"),
        Dtype("U16", 2, "uint16", None),
        Dtype("F16", 2, "float16", "HalfStorage"),
        Dtype("BF16", 2, "bfloat16", "BFloat16Storage"),
        Dtype("I32", 4, "int32", "IntStorage"),
        Dtype("U32", 4, "uint32", None),
        Dtype("F32", 4, "float32", "FloatStorage"),
        Dtype("I64", 8, "int64", "LongStorage"),
        Dtype("U64", 8, "uint64", None),
        Dtype("F64", 8, "float64", "DoubleStorage"),
        Dtype("C64", 8, "complex64", "ComplexFloatStorage"),
    )
}
BY_TORCH_NAME = {f"torch.{dtype.torch}": dtype for dtype in DTYPES.values()}
BY_STORAGE = {f"torch.{dtype.storage}": dtype for dtype in DTYPES.values() if dtype.storage}

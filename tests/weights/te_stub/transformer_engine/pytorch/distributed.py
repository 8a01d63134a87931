"""Stand-in for Transformer Engine's random-state bookkeeping and recomputation: importable, never called."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext


class CudaRNGStatesTracker:
    """Base of Megatron's tracker class."""


def activation_recompute_forward(*_: object, **__: object) -> AbstractContextManager[None]:
    return nullcontext()


def is_fp8_activation_recompute_enabled() -> bool:
    return False

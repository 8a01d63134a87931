"""Stand-in for the FP8 switches: never on."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext


class FP8GlobalStateManager:
    """Asked by Megatron, per module, whether FP8 is on."""

    @staticmethod
    def is_fp8_enabled() -> bool:
        return False


def fp8_autocast(*_: object, **__: object) -> AbstractContextManager[None]:
    return nullcontext()


def fp8_model_init(*_: object, **__: object) -> AbstractContextManager[None]:
    return nullcontext()

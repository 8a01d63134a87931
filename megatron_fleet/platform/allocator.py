"""Settings of torch's allocator of device memory. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Mapping

from megatron_fleet.config.errors import UserError

_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Variables with the settings of torch's allocator."""


def check_allocator(environ: Mapping[str, str]) -> None:
    """Refuse an allocator whose memory torch shares between processes by ``pidfd_getfd``, which needs the right to
    debug the other process: most containers, and kernels with Yama's default, refuse it.

    Raises:
        UserError: expandable segments are on.
    """
    for name in _ALLOCATOR:
        settings = [part.replace(" ", "").lower() for part in environ.get(name, "").split(",")]
        if "expandable_segments:true" in settings:
            raise UserError(
                f"{name}={environ[name]}: memory in expandable segments cannot be shared with the engines "
                f"(transport cuda_ipc); take expandable_segments:True out, or set rollout.engine.transport=disk."
            )

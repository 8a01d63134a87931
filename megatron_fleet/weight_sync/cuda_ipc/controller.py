"""Controller side of the ``cuda_ipc`` transport. Nothing here imports torch."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from megatron_fleet.config.errors import UserError
from megatron_fleet.weight_sync.base import WeightReceiver, WeightSender

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


class CudaIpcTransport:
    """`weight_sync.base.Transport`."""

    name = "cuda_ipc"
    lasting = False

    def __init__(self, options: Mapping[str, Any]) -> None:
        # Engines lost during an update request it again before it has finished.
        self._turn = asyncio.Lock()

    async def sync(self, trainer: WeightSender, engines: WeightReceiver, version: int) -> None:
        """See `Transport.sync`."""
        async with self._turn:
            await engines.open_transport(await trainer.prepare_weights(self.name, {}))
            await engines.begin_update()
            await trainer.send_weights(version, {}, engines.load)
        await engines.finish_update(version, None)

    def close(self) -> None:
        """See `Transport.close`."""

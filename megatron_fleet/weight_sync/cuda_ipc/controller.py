"""Controller side of the ``cuda_ipc`` transport. Nothing here imports torch."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from megatron_fleet.weight_sync.base import WeightReceiver, WeightSender


class CudaIpcTransport:
    """`weight_sync.base.Transport`."""

    name = "cuda_ipc"
    lasting = False

    def __init__(self, options: Mapping[str, Any]) -> None:
        # Engines lost during an update request it again before it has finished.
        self._turn = asyncio.Lock()

    async def sync(self, trainer: WeightSender, engines: WeightReceiver, version: int) -> None:
        async with self._turn:
            await engines.open_transport(await trainer.prepare_weights(self.name, {}))
            await engines.begin_update()
            await trainer.send_weights(version, {}, engines.load)
        await engines.finish_update(version, None)

    def close(self) -> None:
        """See `Transport.close`."""

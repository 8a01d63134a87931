"""Controller side of the ``gloo`` and ``nccl`` transports. Nothing here imports torch."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any, ClassVar

from megatron_fleet.config.errors import UserError
from megatron_fleet.weight_sync.base import WeightReceiver, WeightSender

log = logging.getLogger(__name__)

ATTEMPTS = 5
"""Attempts per update. Each failure has lost an engine, or the network between engines and trainer is broken."""


class BroadcastTransport:
    """`weight_sync.base.Transport`."""

    name: ClassVar[str]
    lasting = False

    def __init__(self, options: Mapping[str, Any]) -> None:
        """Raises UserError without an ``address``."""
        if not options.get("address"):
            raise UserError(
                f"rollout.engine.transport={self.name} needs the address of the trainer's host as engines reach it."
            )
        self._address = options["address"]
        # Engines lost during an update request it again before it has finished.
        self._turn = asyncio.Lock()

    async def sync(self, trainer: WeightSender, engines: WeightReceiver, version: int) -> None:
        """See `Transport.sync`. Raises RuntimeError if engines were lost in ``ATTEMPTS`` attempts."""
        async with self._turn:
            await self._send(trainer, engines, version)
        await engines.finish_update(version, None)

    def close(self) -> None:
        """See `Transport.close`."""

    async def _send(self, trainer: WeightSender, engines: WeightReceiver, version: int) -> None:
        for attempt in range(ATTEMPTS):
            init_info = await trainer.prepare_weights(self.name, {"address": self._address})
            await engines.open_transport(init_info)
            if attempt == 0:
                await engines.begin_update()
            broken = await self._attempt(trainer, engines, version)
            if not broken:
                return
            log.warning("weights of version %d are sent again: %s", version, broken)
        raise RuntimeError(f"weights of version {version} were not received in {ATTEMPTS} attempts: {broken}")

    async def _attempt(self, trainer: WeightSender, engines: WeightReceiver, version: int) -> str:
        """Run one attempt; return the reason it failed, if engines were lost."""
        broken: list[str] = []

        async def deliver(message: Mapping[str, Any]) -> None:
            broken.append(message["broken"])

        loading = asyncio.ensure_future(engines.load({}))
        try:
            await trainer.send_weights(version, {}, deliver)
        except BaseException:
            await asyncio.gather(loading, return_exceptions=True)
            raise
        await loading
        return broken[0] if broken else ""


class GlooTransport(BroadcastTransport):
    """Transport between CPUs, on one host or several."""

    name = "gloo"


class NcclTransport(BroadcastTransport):
    """Transport between CUDA devices that engines and trainer do not share."""

    name = "nccl"

"""Controller side of the ``message`` transport, its only one: samplers read the trainer's message by themselves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_fleet.weight_sync.base import WeightReceiver, WeightSender


class MessageTransport:
    """`weight_sync.base.Transport` for trainers without ranks, which describe each version in one message."""

    name = "message"
    lasting = True

    def __init__(self, options: Mapping[str, Any]) -> None:
        """No option is used."""

    async def sync(self, trainer: WeightSender, engines: WeightReceiver, version: int) -> None:
        """See `Transport.sync`.

        Raises:
            RuntimeError: the trainer sent no message, or several.
        """
        sent: list[Mapping[str, Any]] = []

        async def deliver(message: Mapping[str, Any]) -> None:
            sent.append(message)
            await engines.load(message)

        await engines.open_transport(await trainer.prepare_weights(self.name, {}))
        await engines.begin_update()
        await trainer.send_weights(version, {}, deliver)
        if len(sent) != 1:
            raise RuntimeError(f"version {version} of the weights was sent in {len(sent)} messages; it must be one")
        await engines.finish_update(version, sent[0])

    def close(self) -> None:
        """See `Transport.close`."""

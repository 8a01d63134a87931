"""What a transport of weights is, on its three sides: controller, trainer ranks, engines. Nothing here imports torch.

A transport is one module (or one sub-package) of this package with all its halves. `Transport` is the controller's: it
asks the trainer to send and the engines to receive, at the same time. What the ranks do is a `Sender`; what an engine
does is a ``WeightTransferEngine`` of vLLM, registered under the transport's name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from megatron_fleet.trainer.base import Deliver


class WeightSender(Protocol):
    """The part of `trainer.base.Trainer` that a transport uses."""

    async def prepare_weights(self, transport: str, options: Mapping[str, Any]) -> Mapping[str, Any]: ...

    async def send_weights(self, version: int, options: Mapping[str, Any], deliver: Deliver) -> None: ...


class WeightReceiver(Protocol):
    """Engines that take an update together: all of a rollout, or one that was restarted.

    An engine that fails during an update is lost, takes no further part in it, and is replaced by its owner.
    """

    async def open_transport(self, init_info: Mapping[str, Any]) -> None:
        """Give every engine what its half of the transport needs before the first update, or anew."""
        ...

    async def begin_update(self) -> None:
        """Stop sampling and forget the old weights; nothing is sampled until `finish_update`."""
        ...

    async def load(self, message: Mapping[str, Any]) -> None:
        """Act on one update message; returns when every engine is through with it."""
        ...

    async def finish_update(self, version: int, message: Mapping[str, Any] | None) -> None:
        """Complete the update: from now on everything sampled is stamped with ``version``.

        Returns when every engine has the version, or was replaced and given it.

        Args:
            message: lets an engine that restarts load this version again by itself, until the next update;
                ``None``: it cannot, the transport must send it again.
        """
        ...


class Transport(Protocol):
    """The controller's half."""

    name: str
    lasting: bool
    """An engine that restarts may load the last version again without the trainer."""

    async def sync(self, trainer: WeightSender, engines: WeightReceiver, version: int) -> None:
        """Put the trainer's present weights on ``engines`` under ``version``; returns when all have them.

        After a failure no engine serves with half a version, and syncing the same version again repairs all. A new
        trainer (after a restart) may be passed in.
        """
        ...

    def close(self) -> None:
        """Free what the transport holds. Idempotent."""
        ...


class Sender(Protocol):
    """The ranks' half. Every rank calls every method, in the same order."""

    def prepare(self, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """See `Trainer.prepare_weights`; what rank 0 returns goes to the controller."""
        ...

    def send(self, version: int, options: Mapping[str, Any], deliver: Outbox) -> None:
        """See `Trainer.send_weights`. ``deliver`` works on rank 0 only."""
        ...

    def close(self) -> None:
        """Free what the sender holds. Idempotent."""
        ...


class Outbox(Protocol):
    """Hands messages to the engines, from rank 0 of the trainer."""

    def post(self, message: Mapping[str, Any]) -> Receipt:
        """Give a message to all engines, without waiting for them. Messages are delivered in order."""
        ...


class Receipt(Protocol):
    """Of one posted message."""

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until every engine is through with the message. Raises when one of them could not be reached at all."""
        ...

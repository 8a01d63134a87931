"""Interfaces of a weight transport: controller, trainer ranks and engines. Nothing here imports torch.

A transport is a package in this one with all three sides. `Transport` is the controller side: it
asks the trainer to send and the engines to receive at the same time. The trainer ranks run a `Sender`; an engine runs
a ``WeightTransferEngine`` of vLLM, registered under the transport's name.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

Deliver = Callable[[Mapping[str, Any]], Awaitable[None]]
"""Function that hands an update message of a transport to the engines and returns when all of them have acted on it."""


class WeightSender(Protocol):
    """Subset of `trainer.base.Trainer` that a transport uses."""

    async def prepare_weights(self, transport: str, options: Mapping[str, Any]) -> Mapping[str, Any]: ...

    async def send_weights(self, version: int, options: Mapping[str, Any], deliver: Deliver) -> None: ...


class WeightReceiver(Protocol):
    """Engines that are updated together: all engines of a rollout, or one that was restarted.

    An engine that fails during an update is dropped from it and replaced by its owner.
    """

    async def open_transport(self, init_info: Mapping[str, Any]) -> None:
        """Initialise or reinitialise the transport on every engine, before the first update."""
        ...

    async def begin_update(self) -> None:
        """Stop sampling and drop the old weights; sampling resumes only after `finish_update`."""
        ...

    async def load(self, message: Mapping[str, Any]) -> None:
        """Process one update message; returns once every engine is done with it."""
        ...

    async def finish_update(self, version: int, message: Mapping[str, Any] | None) -> None:
        """Complete the update: everything sampled from now on is stamped with ``version``.

        Returns once every engine has the version, or was replaced and given it.

        Args:
            message: lets a restarted engine load this version by itself until the next update; ``None``: it cannot, and
                the transport must send it again.
        """
        ...


class SingleReceiver(WeightReceiver, Protocol):
    """One engine that was restarted. Its failures are raised."""

    @property
    def begun(self) -> bool:
        """Whether an update has begun, so that the engine no longer holds a complete version until it ends."""
        ...


class Transport(Protocol):
    """Controller side of a transport."""

    name: str
    lasting: bool
    """Whether a restarted engine can load the last version without the trainer."""

    async def sync(self, trainer: WeightSender, engines: WeightReceiver, version: int) -> None:
        """Load the trainer's current weights into ``engines`` as ``version``; returns once all have them.

        After a failure no engine serves a partially loaded version, and syncing the same version again recovers fully.
        A new trainer (after a restart) may be passed in.
        """
        ...

    def close(self) -> None:
        """Free the transport's resources. Idempotent."""
        ...


class Sender(Protocol):
    """Trainer side of a transport. Every rank calls every method, in the same order."""

    def prepare(self, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """See `Trainer.prepare_weights`; rank 0's return value is sent to the controller."""
        ...

    def send(self, version: int, options: Mapping[str, Any], deliver: Outbox) -> None:
        """See `Trainer.send_weights`. ``deliver`` works on rank 0 only."""
        ...

    def close(self) -> None:
        """Free the sender's resources. Idempotent."""
        ...


class Outbox(Protocol):
    """Sends messages to the engines, from rank 0 of the trainer."""

    def post(self, message: Mapping[str, Any]) -> Receipt:
        """Post a message to all engines without waiting for them. Messages are delivered in order."""
        ...


class Receipt(Protocol):
    """Delivery receipt of one posted message."""

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until every engine is done with the message. Raises if any of them could not be reached."""
        ...

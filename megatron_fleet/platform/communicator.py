"""The few collectives that weights and checkpoints need, independent of any framework's process groups."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist

from megatron_fleet.config.errors import UserError


class Communicator(Protocol):
    """Fixed set of processes. Every method is collective: all members call it, in the same order."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_gather(self, value: Any) -> list[Any]:
        """Return ``value`` (small, picklable) of every rank, in rank order."""
        ...

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Overwrite ``tensor`` with the one of rank ``source``."""
        ...


class Alone:
    """The communicator of one process."""

    rank = 0
    size = 1

    def all_gather(self, value: Any) -> list[Any]:
        return [value]

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        pass


class TorchCommunicator:
    """A torch.distributed process group; ``None`` = the default group."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group or dist.group.WORLD
        self.rank = dist.get_rank(self._group)
        self.size = dist.get_world_size(self._group)

    def all_gather(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        dist.broadcast(tensor, group=self._group, group_src=source)


class PeerError(RuntimeError):
    """Another rank failed; its own traceback is in that rank's log."""


@contextmanager
def together(comm: Communicator) -> Iterator[None]:
    """Run the block on every rank; if it fails on one, raise on all, so that none is left waiting.

    A failed rank raises its own exception. The others raise UserError if that was one, else PeerError.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as e:
        error = e
    report = None if error is None else (isinstance(error, UserError), str(error) or type(error).__name__)
    failures = [(rank, *r) for rank, r in enumerate(comm.all_gather(report)) if r]
    if error is not None:
        raise error
    for rank, is_user_error, message in failures:
        raise UserError(message) if is_user_error else PeerError(f"rank {rank}: {message}")

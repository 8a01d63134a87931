"""Exchange between the trainer's ranks: joining, groups, and each kind of collective, in one place."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

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
    """A torch.distributed process group; ``None`` = all ranks, which `join` or `join_at` has connected."""

    def __init__(self, group: ProcessGroup | None = None) -> None:
        self._group = group or dist.group.WORLD
        self.rank = dist.get_rank(self._group)
        self.size = dist.get_world_size(self._group)

    def all_gather(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        dist.broadcast(tensor, group=self._group, group_src=source)

    def broadcast_value(self, value: Any, source: int) -> Any:
        """Return the ``value`` (small, picklable) of rank ``source``."""
        box = [value]
        if self.size > 1:
            dist.broadcast_object_list(box, group=self._group, group_src=source)
        return box[0]

    def broadcast_bytes(self, data: bytes, source: int) -> bytes:
        """Return the ``data`` of rank ``source``, of any size; the group must work on CPU tensors."""
        if self.size == 1:
            return data
        length = torch.tensor([len(data)])
        self.broadcast(length, source)
        content = torch.empty(int(length), dtype=torch.uint8)
        if self.rank == source and data:
            content = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self.broadcast(content, source)
        return data if self.rank == source else content.numpy().tobytes()

    def sum_(self, tensor: torch.Tensor) -> None:
        """Replace ``tensor`` by its sum over the ranks."""
        dist.all_reduce(tensor, group=self._group)

    def max_(self, tensor: torch.Tensor) -> None:
        """Replace ``tensor`` by its maximum over the ranks."""
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._group)

    def barrier(self) -> None:
        """Wait for all ranks."""
        dist.barrier(group=self._group)

    def split(self, color: int, timeout_s: float) -> TorchCommunicator:
        """Communicator of the ranks with the same ``color``, in rank order, for tensors on CPUs.

        Args:
            timeout_s: of each exchange in it.
        """
        colors = self.all_gather(color)
        members = [[rank for rank, other in enumerate(colors) if other == each] for each in sorted(set(colors))]
        timeout = timedelta(seconds=timeout_s)
        groups = [dist.new_group(ranks, timeout=timeout, backend="gloo") for ranks in members]
        return TorchCommunicator(groups[sorted(set(colors)).index(color)])


def join(backend: str) -> None:
    """Connect all ranks as torchrun's variables say (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT), or this process alone
    without them; nothing happens when they are connected.
    """
    if dist.is_initialized():
        return
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def join_at(
    rendezvous: str, listener: socket.socket | None, *, backend: str, rank: int, size: int, key: str, timeout_s: float
) -> None:
    """Connect all ranks through a store at ``rendezvous``.

    Args:
        rendezvous: ``host:port`` at which rank 0 listens.
        listener: rank 0's socket there.
        key: prefix of the store's keys; only ranks with the same one meet.
        timeout_s: of the meeting, and of each exchange afterwards.
    """
    timeout = timedelta(seconds=timeout_s)
    host, port = rendezvous.rsplit(":", 1)
    how: dict[str, Any] = {"timeout": timeout, "wait_for_workers": False}
    if listener is not None:
        how |= {"is_master": True, "master_listen_fd": listener.detach()}
    store = dist.PrefixStore(key, dist.TCPStore(host, int(port), size, **how))
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)


def leave() -> None:
    """Disconnect from all ranks, if connected."""
    if dist.is_initialized():
        dist.destroy_process_group()


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

"""Process groups that receive broadcasts from rank 0, with deadlines, over gloo or NCCL."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, Store
from torch.distributed.distributed_c10d import BroadcastOptions

from megatron_fleet.weight_sync.broadcast.rendezvous import GroupBroken

CONNECT_S = 60.0
"""Timeout for all members to connect to each other."""
STALL_S = 120.0
"""Timeout of one broadcast: a member may still be loading the previous bucket."""
_POLL_S = 1e-3

T = TypeVar("T")


class Group(Protocol):
    """Connects when constructed; raises `GroupBroken` if that or a broadcast fails."""

    def __init__(self, store: Store, rank: int, size: int, own_address: str, device: torch.device) -> None: ...

    def broadcast(self, memory: torch.Tensor) -> None:
        """Overwrite uint8 ``memory`` with rank 0's; returns once it has been sent and received here."""
        ...

    def close(self) -> None:
        """Disconnect; members that wait for this one are notified."""
        ...


class GlooGroup:
    """`Group` over gloo, for CPU memory.

    The constructor blocks Python's other threads, so call it only when all members are ready.
    """

    def __init__(self, store: Store, rank: int, size: int, own_address: str, device: torch.device) -> None:
        gloo: Any = ProcessGroupGloo  # its annotations lack these methods
        options = gloo._Options()
        options._timeout = timedelta(seconds=CONNECT_S)
        options._devices = [gloo.create_device(hostname=own_address)]
        try:
            self._group = gloo(PrefixStore("gloo", store), rank, size, options)
        except RuntimeError as e:
            raise GroupBroken(f"not all {size} members connected: {e}") from e
        self._options = BroadcastOptions()
        self._options.rootRank = self._options.rootTensor = 0
        self._options.timeout = timedelta(seconds=STALL_S)

    def broadcast(self, memory: torch.Tensor) -> None:
        """See `Group.broadcast`."""
        try:
            self._group.broadcast([memory], self._options).wait()
        except RuntimeError as e:
            raise GroupBroken(str(e)) from e

    def close(self) -> None:
        """See `Group.close`."""
        if hasattr(self, "_group"):
            del self._group


class NcclGroup:
    """`Group` over NCCL, for memory of one CUDA device."""

    def __init__(self, store: Store, rank: int, size: int, own_address: str, device: torch.device) -> None:
        from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
        from vllm.distributed.utils import StatelessProcessGroup
        from vllm.utils.nccl import unpinned_nccl_env

        group = StatelessProcessGroup(rank, size, PrefixStore("nccl", store))

        def connect() -> PyNcclCommunicator:
            with unpinned_nccl_env():
                return PyNcclCommunicator(group, device)

        try:
            self._communicator = _within(CONNECT_S, connect)
        except (RuntimeError, TimeoutError) as e:
            raise GroupBroken(f"not all {size} members connected: {e}") from e
        if self._communicator.disabled:
            raise RuntimeError("nccl: NCCL is not available; use another rollout.engine.transport")

    def broadcast(self, memory: torch.Tensor) -> None:
        """See `Group.broadcast`."""
        with torch.cuda.device(memory.device):
            stream, done = torch.cuda.current_stream(), torch.cuda.Event()
            self._communicator.broadcast(memory, src=0, stream=stream)
            done.record(stream)
        deadline = time.monotonic() + STALL_S
        while not done.query():  # NCCL itself waits forever for a member that died
            if time.monotonic() > deadline:
                raise GroupBroken(f"a broadcast was not through after {STALL_S:.0f} s")
            time.sleep(_POLL_S)

    def close(self) -> None:
        """See `Group.close`. Aborts an unfinished broadcast."""
        self._communicator.destroy()


def _within(seconds: float, function: Callable[[], T]) -> T:
    """Result of ``function``; after a TimeoutError it continues in its thread, which ends with the process."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(function())
        except BaseException as e:
            errors.append(e)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError(f"nothing happened for {seconds:.0f} s")
    return results[0]

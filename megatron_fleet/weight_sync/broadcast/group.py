"""Group of one update: its members' rendezvous, broadcasts from rank 0 over gloo or NCCL, and what is broadcast.

The rendezvous is at a store opened by rank 0 of the trainer. Every wait has a deadline.
"""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, Store, TCPStore
from torch.distributed.distributed_c10d import BroadcastOptions

from megatron_fleet.weight_sync.buckets import ALIGNMENT, BucketLayout, checksum

OPEN_S = 1800.0
"""Engines' timeout for rank 0, which may have other work to do first. They notice immediately if it dies."""
JOIN_S = 60.0
"""Rank 0's timeout for engines that have registered."""
_LAYOUT, _MEMBERS, _READY, _SIZE = "layout", "members", "ready", "size"
CONNECT_S = 60.0
"""Timeout for all members to connect to each other."""
STALL_S = 120.0
"""Timeout of one broadcast: a member may still be loading the previous bucket."""
_POLL_S = 1e-3

T = TypeVar("T")


class GroupBroken(RuntimeError):
    """A member died or stopped responding; the group is unusable."""


class Rendezvous:
    """Rank 0's side of the rendezvous.

    The port is bound here, once, and never released in between. A store does not authenticate clients, so its keys
    begin with a secret that is passed to the engines with the address: strangers do not take part by accident. A client
    that can connect may still list the keys.
    """

    def __init__(self, address: str, layout: str) -> None:
        """Listen.

        Args:
            address: of this host, as reachable by engines.
            layout: description of the buckets, with everything that members need.

        Raises:
            OSError: this host does not have the address.
        """
        listener = socket.create_server((address, 0), backlog=1024)
        port = listener.getsockname()[1]
        secret = secrets.token_hex(16)
        server = TCPStore(
            address,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=JOIN_S),
            master_listen_fd=listener.detach(),
        )
        self.address = address
        self.store = PrefixStore(secret, server)
        self.store.set(_LAYOUT, layout)
        self.init_info: dict[str, Any] = {"address": address, "port": port, "secret": secret}

    def meet(self) -> int:
        """Close registration and wait until all members are ready; return the group size, including rank 0.

        Raises:
            GroupBroken: a member was not ready within ``JOIN_S``.
        """
        size = 1 + int(self.store.add(_MEMBERS, 0))
        with _broken(f"not all {size - 1} registered engine workers connected"):
            if size > 1:
                self.store.wait([f"{_READY}/{number}" for number in range(1, size)], timedelta(seconds=JOIN_S))
            self.store.set(_SIZE, str(size))
        return size


class Membership:
    """An engine worker's side of the rendezvous.

    Attributes:
        number: rank in the group, from 1; 0 before `register`.
        own_address: this host's address on the route to rank 0.
        layout: from rank 0.
    """

    def __init__(self, address: str, port: int, secret: str) -> None:
        """Connect. Raises OSError or a torch.distributed error if nothing answers."""
        with socket.create_connection((address, port), JOIN_S) as probe:
            self.own_address = probe.getsockname()[0]
        client = TCPStore(address, port, is_master=False, timeout=timedelta(seconds=JOIN_S))
        self.store = PrefixStore(secret, client)
        self.layout = self.store.get(_LAYOUT).decode()
        self.number = 0

    def register(self) -> None:
        """Join the next group."""
        self.number = int(self.store.add(_MEMBERS, 1))

    def meet(self) -> int:
        """Wait until all members are ready; return the group size. Raises `GroupBroken`."""
        with _broken("rank 0 of the trainer did not connect"):
            self.store.set(f"{_READY}/{self.number}", "")
            self.store.wait([_SIZE], timedelta(seconds=OPEN_S))
            return int(self.store.get(_SIZE))


@contextmanager
def _broken(what: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as e:  # the base class of torch.distributed's errors
        raise GroupBroken(f"{what}: {e}") from e


class UpdateGroup(Protocol):
    """Connects when constructed; raises `GroupBroken` if that or a broadcast fails."""

    def __init__(self, store: Store, rank: int, size: int, own_address: str, device: torch.device) -> None: ...

    def broadcast(self, memory: torch.Tensor) -> None:
        """Overwrite uint8 ``memory`` with rank 0's; returns once it has been sent and received here."""
        ...

    def close(self) -> None:
        """Disconnect; members that wait for this one are notified."""
        ...


class GlooGroup:
    """`UpdateGroup` over gloo, for CPU memory.

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
        try:
            self._group.broadcast([memory], self._options).wait()
        except RuntimeError as e:
            raise GroupBroken(str(e)) from e

    def close(self) -> None:
        if hasattr(self, "_group"):
            del self._group


class NcclGroup:
    """`UpdateGroup` over NCCL, for memory of one CUDA device."""

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
        with torch.cuda.device(memory.device):
            stream, done = torch.cuda.current_stream(), torch.cuda.Event()
            self._communicator.broadcast(memory, src=0, stream=stream)
            done.record(stream)
        deadline = time.monotonic() + STALL_S
        while not done.query():  # NCCL itself waits forever for a member that died
            if time.monotonic() > deadline:
                raise GroupBroken(f"a broadcast was not finished after {STALL_S:.0f} s")
            time.sleep(_POLL_S)

    def close(self) -> None:
        """See `UpdateGroup.close`. Aborts an unfinished broadcast."""
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
        raise TimeoutError(f"no progress for {seconds:.0f} s")
    return results[0]


class DamagedBucket(ValueError):
    """The checksum of a bucket does not match."""


def packed_bytes(layout: BucketLayout, bucket: int) -> int:
    """Size of a packed bucket in bytes."""
    start, end = layout.spans[bucket]
    return end - start + ALIGNMENT


def pack(layout: BucketLayout, bucket: int, tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Pack the tensors of a bucket, in layout order, and their checksum into uint8 memory on ``device``."""
    memory = torch.zeros(packed_bytes(layout, bucket), dtype=torch.uint8, device=device)
    start, end = layout.spans[bucket]
    for (_, place), tensor in zip(layout.tensors(bucket, memory, start), tensors, strict=True):
        place.copy_(tensor)
    total = checksum(memory[: end - start])
    memory[end - start :].view(torch.int64)[0] = total - (1 << 64) if total >> 63 else total
    return memory


def unpack(layout: BucketLayout, bucket: int, memory: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """(name, tensor) of every tensor of a packed bucket, as views. Raises `DamagedBucket`."""
    start, end = layout.spans[bucket]
    declared = int(memory[end - start :].view(torch.int64)[0]) % 2**64
    if checksum(memory[: end - start]) != declared:
        raise DamagedBucket(f"checksum of bucket {bucket} differs")
    return layout.tensors(bucket, memory, start)

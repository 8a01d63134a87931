"""Publishing weights to the engines: shared memory where engines run on CPU, CUDA IPC where they share the GPUs."""

from __future__ import annotations

import os
from typing import Any, Protocol

import torch

from megatron_fleet.config.errors import UserError
from megatron_fleet.weights.communicator import Communicator, together
from megatron_fleet.weights.source import MegatronWeightSource, ParamMeta, view_in
from megatron_fleet.weights.vllm_shm import ALIGNMENT, checksum


class WeightClient(Protocol):
    """The control side of the engines; structurally vLLM's ``VLLMWeightSyncClient``. Synchronous, rank 0 only."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None: ...

    def start_weight_update(self) -> None: ...

    def update_weights(self, update_info: dict[str, Any]) -> None: ...

    def finish_weight_update(self, weight_version: str | None = None) -> None: ...


class Publisher(Protocol):
    """Every rank calls every method, in the same order."""

    def publish(self, version: int) -> None:
        """Put the present weights on every engine under ``version``; returns when all engines have them."""
        ...

    def close(self) -> None:
        """Free what the transfer holds. Idempotent."""
        ...


def make_publisher(
    source: MegatronWeightSource, client: WeightClient | None, world: Communicator, device: torch.device
) -> Publisher:
    """The publisher for ``device``; collective over ``world``. ``client`` is needed on rank 0 only."""
    if device.type == "cuda":
        return IpcPublisher(source, client, world)
    return ShmPublisher(source, client, world)


def place(metadata: list[ParamMeta]) -> tuple[dict[str, int], int]:
    """Aligned byte offset of every tensor in one buffer, and the size of the buffer."""
    offsets: dict[str, int] = {}
    end = 0
    for meta in metadata:
        offsets[meta.name] = -(-end // ALIGNMENT) * ALIGNMENT
        end = offsets[meta.name] + meta.nbytes
    return offsets, end


class ShmPublisher:
    """One shared buffer on this host: every rank writes the rows it owns, the engines map the same memory.

    The buffer is an anonymous file (memfd) of rank 0, reached by others through ``/proc``. It has no name to leave
    behind: the kernel frees it with its last user, even when that one is killed.
    """

    def __init__(self, source: MegatronWeightSource, client: WeightClient | None, world: Communicator) -> None:
        self._source, self._client, self._world = source, client, world
        self._offsets, nbytes = place(source.metadata())
        self._fd: int | None = None
        path = ""
        with together(world):
            if world.rank == 0:
                path = self._allocate(nbytes)
        path = world.all_gather(path)[0]
        with together(world):
            self._buffer: torch.Tensor | None = _map(path, nbytes)
        self._init_info: dict[str, Any] | None = {"path": path, "nbytes": nbytes}

    def publish(self, version: int) -> None:
        """See Publisher. Raises on every rank when one of them, or an engine, failed."""
        if self._buffer is None:
            raise RuntimeError("publish() after close()")
        with together(self._world):
            if self._source.shard.replica == 0:
                self._source.write_local(self._buffer, self._offsets)
        sums = self._checksums(self._buffer)
        # The closing agreement also keeps fast ranks from writing the next version while engines still read this one.
        with together(self._world):
            if self._world.rank == 0:
                self._send(version, sums)

    def close(self) -> None:
        self._buffer = None
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _allocate(self, nbytes: int) -> str:
        self._fd = os.memfd_create("megatron_fleet-weights", os.MFD_CLOEXEC)
        try:
            # Reserved now, because running out of memory later would be a SIGBUS in whoever writes.
            os.posix_fallocate(self._fd, 0, nbytes)
        except OSError as e:
            self.close()
            raise UserError(
                f"weight transfer needs {nbytes / 2**20:.0f} MiB of shared memory on this host and got none "
                f"({e.strerror}); free memory or use a smaller model.dtype."
            ) from None
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def _checksums(self, buffer: torch.Tensor) -> list[int]:
        """CRC-32 of every tensor, the work shared by the ranks."""
        metadata = self._source.metadata()
        rank, size = self._world.rank, self._world.size
        mine = [
            checksum(view_in(buffer, self._offsets[m.name], torch.uint8, (m.nbytes,)).numpy())
            for m in metadata[rank::size]
        ]
        gathered = self._world.all_gather(mine)
        return [gathered[k % size][k // size] for k in range(len(metadata))]

    def _send(self, version: int, sums: list[int]) -> None:
        assert self._client is not None, "rank 0 publishes and needs a client"
        if self._init_info is not None:
            self._client.init_weight_transfer_engine(self._init_info)
            self._init_info = None
        metadata = self._source.metadata()
        self._client.start_weight_update()
        self._client.update_weights(
            {
                "names": [m.name for m in metadata],
                "dtype_names": [str(m.dtype).removeprefix("torch.") for m in metadata],
                "shapes": [list(m.shape) for m in metadata],
                "offsets": [self._offsets[m.name] for m in metadata],
                "checksums": sums,
            }
        )
        self._client.finish_weight_update(str(version))


class IpcPublisher:
    """vLLM's own packed CUDA-IPC transfer: engines on the same GPUs read the trainer's memory.

    vLLM gathers the handles over the default process group, which must be the ranks that share GPUs with the engines.
    """

    MIN_BUFFER_BYTES = 1 << 30

    def __init__(self, source: MegatronWeightSource, client: WeightClient | None, world: Communicator) -> None:
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

        self._versioned = _VersionedClient(client)
        largest = max(m.nbytes for m in source.metadata())
        info = IPCTrainerInitInfo(
            rank=world.rank, packed=True, packed_buffer_size_bytes=max(self.MIN_BUFFER_BYTES, largest)
        )
        # vLLM asks for its own abstract class and uses only what `source` has: metadata() and iteration.
        structural: Any = source
        self._engine = WeightTransferTrainerFactory.trainer_init(info, client=self._versioned, source=structural)

    def publish(self, version: int) -> None:
        self._versioned.version = str(version)
        self._engine.send_weights()

    def close(self) -> None:
        self._engine.shutdown()


class _VersionedClient:
    """vLLM's trainer engines finish an update without a version; this client adds it."""

    def __init__(self, client: WeightClient | None) -> None:
        self._client = client
        self.version: str | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        assert self._client is not None, "rank 0 publishes and needs a client"
        self._client.finish_weight_update(weight_version or self.version)


def _map(path: str, nbytes: int) -> torch.Tensor:
    try:
        return torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8)
    except RuntimeError as e:
        raise UserError(
            f"the shared weight buffer {path} of rank 0 cannot be mapped ({e}); all ranks must run on one host."
        ) from None

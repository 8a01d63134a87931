"""Publishing weights to the engines. How they travel follows from where engines are.

=====================================  ===============  ===========================================
engines                                backend          publisher
=====================================  ===============  ===========================================
on the trainer's host, on CPU          ``fleet_shm``    `publish_shm.ShmPublisher`
on the trainer's GPUs                  ``ipc``          `ipc_publisher`
elsewhere                              ``nccl``         `nccl_publisher`
elsewhere, and the model is huge       ``sharded_rdt``  `sharded_publisher`
=====================================  ===============  ===========================================
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import torch

from megatron_fleet.platform.communicator import Communicator
from megatron_fleet.storage.folder import Folder
from megatron_fleet.weight_sync.publish_shm import ShmPublisher
from megatron_fleet.weight_sync.weight_client import VersionedClient, WeightClient
from megatron_fleet.weight_sync.wire import Source, Wire, WireSource
from megatron_fleet.weights.hf_model import open_model
from megatron_fleet.weights.source import MegatronWeightSource

__all__ = ["Publisher", "WeightClient", "ipc_publisher", "make_publisher", "nccl_publisher", "sharded_publisher"]

IPC_BUFFER_BYTES = 1 << 30


class Publisher(Protocol):
    """Every rank calls every method, in the same order."""

    def publish(self, version: int) -> None:
        """Put the present weights on every engine under ``version``; returns when all engines have them.

        After a failure no engine serves with half a version, and publishing the same version again repairs all.
        """
        ...

    def close(self) -> None:
        """Free what the transfer holds. Idempotent."""
        ...


def make_publisher(
    source: MegatronWeightSource,
    client: WeightClient | None,
    world: Communicator,
    device: torch.device,
    engine_model: Folder | Path | str | None = None,
) -> Publisher:
    """The publisher for engines beside a trainer on ``device``; collective over ``world``.

    Args:
        client: needed on rank 0 only.
        engine_model: HF folder that engines start from. What it stores quantised travels quantised; ``None``: nothing
            does.

    Raises:
        UserError: the folder is none, or there is no memory.
    """
    wire = Wire() if engine_model is None else Wire(open_model(engine_model))
    if device.type == "cuda":
        return ipc_publisher(source, client, world, wire)
    return ShmPublisher(source, client, world, wire)


class VllmPublisher:
    """One of vLLM's own trainer engines under the `Publisher` protocol.

    Its engines cannot take a version a second time: the memory it came from is used again at once.
    """

    def __init__(self, info: Any, source: Source, client: WeightClient | None) -> None:
        """Collective. ``info``: vLLM's ``TrainerInitInfo`` of the backend."""
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

        self._client = VersionedClient(client)
        # vLLM asks for its own abstract class and uses only the methods that `Source` has.
        structural: Any = source
        self._engine: Any = WeightTransferTrainerFactory.trainer_init(info, client=self._client, source=structural)

    def publish(self, version: int) -> None:
        """See `Publisher.publish`."""
        if self._engine is None:
            raise RuntimeError("publish() after close()")
        self._client.version = version
        self._engine.send_weights()

    def close(self) -> None:
        """See `Publisher.close`."""
        if self._engine is not None:
            self._engine.shutdown()
            self._engine = None


def ipc_publisher(source: Source, client: WeightClient | None, world: Communicator, wire: Wire) -> VllmPublisher:
    """Engines on the same GPUs read the trainer's memory, through vLLM's packed CUDA IPC.

    vLLM gathers the handles over the default process group, which must be the ranks that share GPUs with the engines.
    """
    from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

    travelling = WireSource(source, wire)
    largest = max(meta.nbytes for meta in travelling.metadata())
    nbytes = max(IPC_BUFFER_BYTES, largest)
    info = IPCTrainerInitInfo(rank=world.rank, packed=True, packed_buffer_size_bytes=nbytes)
    return VllmPublisher(info, travelling, client)


def nccl_publisher(
    source: Source, client: WeightClient | None, world: Communicator, wire: Wire, address: str, port: int, workers: int
) -> VllmPublisher:
    """Rank 0 broadcasts whole tensors to engines on other GPUs.

    Args:
        address, port: of rank 0's host, reachable from the engines; the port is free.
        workers: GPUs of all engines together.
    """
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    info = NCCLTrainerInitInfo(
        rank=world.rank, master_address=address, master_port=port, world_size=1 + workers, packed=True
    )
    return VllmPublisher(info, WireSource(source, wire), client)


def sharded_publisher(
    source: Source,
    client: WeightClient | None,
    world: Communicator,
    wire: Wire,
    workers: int,
    workers_per_engine: int,
    namespace: str,
) -> VllmPublisher:
    """Engines pull the slices they need from the ranks, over NIXL; needs Ray and ``nixl`` on both sides.

    Args:
        workers: GPUs of all engines together.
        workers_per_engine: GPUs of one.
        namespace: the Ray namespace in which engines look for the ranks' actors.
    """
    from vllm.distributed.weight_transfer.sharded_rdt_trainer import ShardedRDTTrainerInitInfo

    info = ShardedRDTTrainerInitInfo(
        rank=world.rank,
        num_consumers=workers,
        workers_per_replica=workers_per_engine,
        trainer_actor_namespace=namespace,
    )
    return VllmPublisher(info, WireSource(source, wire), client)

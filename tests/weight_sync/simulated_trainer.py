"""Senders on simulated ranks, as `WeightSender`, and engines that only record, as `WeightReceiver`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import torch
from local_sender import LocalOutbox
from weight_fixtures import ThreadCommunicator, run_ranks

from megatron_fleet.platform.communicator import PeerError
from megatron_fleet.weight_sync.base import Deliver, Sender
from megatron_fleet.weight_sync.buckets import checksum
from megatron_fleet.weight_sync.shm.board import SUMMED
from megatron_fleet.weight_sync.shm.sender import map_memory, parse_layout

MakeSender = Callable[[ThreadCommunicator], Sender]


class SimulatedTrainer:
    """Every rank is a thread.

    Attributes:
        errors: what the ranks raised in the last verb that failed, ``None`` where nothing.
    """

    def __init__(self, ranks: int, make: MakeSender) -> None:
        self._ranks, self._make = ranks, make
        self._senders: list[Sender | None] = [None] * ranks
        self.errors: list[Exception | None] = []

    async def prepare_weights(self, transport: str, options: Mapping[str, Any]) -> Mapping[str, Any]:
        return (await self._all(lambda sender: sender.prepare(options)))[0]

    async def send_weights(self, version: int, options: Mapping[str, Any], deliver: Deliver) -> None:
        outbox = LocalOutbox(deliver, asyncio.get_running_loop())
        await self._all(lambda sender: sender.send(version, options, outbox))

    def close(self) -> None:
        for sender in self._senders:
            if sender is not None:
                sender.close()

    async def _all(self, verb: Callable[[Sender], Any]) -> list[Any]:
        def body(comm: ThreadCommunicator) -> Any:
            sender = self._senders[comm.rank]
            if sender is None:
                sender = self._senders[comm.rank] = self._make(comm)
            return verb(sender)

        results = await asyncio.to_thread(run_ranks, self._ranks, body)
        self.errors = [r if isinstance(r, Exception) else None for r in results]
        errors = sorted((e for e in self.errors if e), key=lambda e: isinstance(e, PeerError))
        if errors:
            raise errors[0]
        return results


class RecordingEngines:
    """One engine that copies out what each shm update brings, as far as the checksums agree.

    Attributes:
        fail: verb that raises, as when all engines are lost in it.
    """

    def __init__(self, fail: str = "") -> None:
        self.calls: list[str] = []
        self.fail = fail
        self.tensors: dict[str, torch.Tensor] = {}
        self.version: int | None = None
        self.last_message: Mapping[str, Any] | None = None

    async def open_transport(self, init_info: Mapping[str, Any]) -> None:
        self._call("open")
        described = dict(init_info)
        self.path = described.pop("path")
        self.layout = parse_layout(described)
        self.memory = map_memory(self.path, self.layout.nbytes)
        self.board = self.layout.board(self.memory)

    async def begin_update(self) -> None:
        self._call("begin")

    async def load(self, message: Mapping[str, Any]) -> None:
        self._call("load")
        await asyncio.to_thread(self.read, message["round"])

    async def finish_update(self, version: int, message: Mapping[str, Any] | None) -> None:
        self._call("finish")
        self.version, self.last_message = version, message

    def read(self, number: int) -> None:
        """Copy the tensors of a round. Raises RoundLost."""
        for bucket in range(len(self.layout.buckets)):
            self.board.wait(SUMMED, bucket, number)
            pieces = [self.layout.piece(bucket, writer) for writer in range(self.layout.writers)]
            start, end = self.layout.spans[bucket]
            assert [p[0] for p in pieces] + [end] == [start, *(p[1] for p in pieces)]
            assert [checksum(self.memory[a:b]) for a, b in pieces] == self.board.checksums[bucket].tolist()
            self.tensors |= {name: tensor.clone() for name, tensor in self.layout.tensors(bucket, self.memory)}
        self.board.check_current(number)

    def _call(self, verb: str) -> None:
        self.calls.append(verb)
        if self.fail == verb:
            raise RuntimeError("all engines died")

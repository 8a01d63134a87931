"""Weights sent from the test process, as a trainer of one rank sends them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file

from megatron_fleet.platform.communicator import Alone
from megatron_fleet.weight_sync.base import Deliver, Sender
from megatron_fleet.weight_sync.registry import make_sender
from megatron_fleet.weights.exchange import OwnedBox, ParamMeta, Place, layer_groups
from megatron_fleet.weights.hf_model import HfModel


class LocalSender:
    """`weight_sync.base.WeightSender` without ranks: the sender of a transport in a thread of this process.

    Attributes:
        sender: of the transport that was prepared last.
        calls: names of the verbs that were called.
    """

    def __init__(self, source: Any, engine_model: HfModel | None = None) -> None:
        """Args: ``source``: a `weights.exchange.WeightSource`. ``engine_model``: see `make_sender`."""
        self._source, self._engine_model = source, engine_model
        self.sender: Sender | None = None
        self.calls: list[str] = []
        self._transport = ""

    async def prepare_weights(self, transport: str, options: Mapping[str, Any]) -> Mapping[str, Any]:
        self.calls.append("prepare_weights")
        return await asyncio.to_thread(self._prepare, transport, options)

    async def send_weights(self, version: int, options: Mapping[str, Any], deliver: Deliver) -> None:
        self.calls.append("send_weights")
        assert self.sender is not None, "send_weights before prepare_weights"
        outbox = LocalOutbox(deliver, asyncio.get_running_loop())
        await asyncio.to_thread(self.sender.send, version, options, outbox)

    def close(self) -> None:
        if self.sender is not None:
            self.sender.close()
            self.sender = None

    def _prepare(self, transport: str, options: Mapping[str, Any]) -> Mapping[str, Any]:
        if self.sender is None or transport != self._transport:
            self.close()
            self.sender = make_sender(transport, self._source, Alone(), torch.device("cpu"), self._engine_model)
            self._transport = transport
        return self.sender.prepare(options)


class LocalOutbox:
    """`weight_sync.base.Outbox` that calls ``deliver`` on an event loop of another thread."""

    def __init__(self, deliver: Deliver, loop: asyncio.AbstractEventLoop) -> None:
        self._deliver, self._loop = deliver, loop
        self._turn = asyncio.Lock()

    def post(self, message: Mapping[str, Any]) -> LocalReceipt:
        async def deliver() -> None:
            async with self._turn:
                await self._deliver(message)

        return LocalReceipt(asyncio.run_coroutine_threadsafe(deliver(), self._loop))


class LocalReceipt:
    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def wait(self, timeout_s: float | None = None) -> None:
        self._future.result(timeout_s)


class FolderWeights:
    """The tensors of a folder's ``model.safetensors``, as they are.

    Attributes:
        folder: may be set to another one of the same model between two updates.
        before_write: called, if set, before each tensor is handed out.
    """

    device = torch.device("cpu")

    def __init__(self, folder: Path) -> None:
        self.folder, self.place = folder, Place()
        self.before_write: Callable[[], None] | None = None

    def metadata(self) -> list[ParamMeta]:
        tensors = self._tensors()
        return [ParamMeta(name, tensors[name].dtype, tuple(tensors[name].shape)) for name in self._order(tensors)]

    def groups(self) -> list[list[str]]:
        return layer_groups(self._order(self._tensors()))

    def owned(self, tensor: str) -> list[OwnedBox]:
        names, rows = list(self._tensors()), (0, len(self._read(tensor)))
        return [OwnedBox(0, (rows, None), names.index(tensor), rows)]

    def values(self, owned: OwnedBox) -> torch.Tensor:
        if self.before_write is not None:
            self.before_write()
        return self._read(list(self._tensors())[owned.local])

    def _read(self, name: str) -> torch.Tensor:
        with safe_open(self.folder / "model.safetensors", framework="pt") as file:
            return file.get_tensor(name)

    def _tensors(self) -> dict[str, torch.Tensor]:
        return load_file(self.folder / "model.safetensors")

    @staticmethod
    def _order(tensors: Mapping[str, torch.Tensor]) -> list[str]:
        names = sorted(tensors, key=lambda name: "layers." not in name)
        return [name for group in layer_groups(names) for name in group]

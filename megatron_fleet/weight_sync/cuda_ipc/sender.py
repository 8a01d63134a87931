"""Trainer side of the ``cuda_ipc`` transport: vLLM's trainer engine, with messages routed through the controller."""

from __future__ import annotations

import base64
import os
import pickle
from collections.abc import Mapping
from typing import Any

import torch

from megatron_fleet.platform.allocator import check_allocator
from megatron_fleet.platform.communicator import Communicator, together
from megatron_fleet.weight_sync.base import Outbox
from megatron_fleet.weight_sync.engine_format import EngineFormat
from megatron_fleet.weights.exchange import FormattedSource, WeightSource

BUFFER_BYTES = 1 << 30
"""Device memory per rank during an update; more if a tensor is larger."""


class CudaIpcSender:
    """`weight_sync.base.Sender`. vLLM gathers handles over the default process group, which must consist of the ranks
    that share GPUs with the engines."""

    def __init__(self, source: WeightSource, world: Communicator, device: torch.device, form: EngineFormat) -> None:
        """Collective over ``world``. Raises UserError when torch's allocator here cannot share memory."""
        check_allocator(os.environ)
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

        formatted = FormattedSource(source, form, world)  # every replica iterates
        nbytes = max(BUFFER_BYTES, *(meta.nbytes for meta in formatted.metadata()))
        info = IPCTrainerInitInfo(rank=world.rank, packed=True, packed_buffer_size_bytes=nbytes)
        self._world = world
        self._client = OutboxClient()
        # vLLM's annotation requires its own abstract class, but it only uses the methods that ours has.
        structural: Any = formatted
        self._engine = WeightTransferTrainerFactory.trainer_init(info, client=self._client, source=structural)

    def prepare(self, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the information that engines need to read the buffer."""
        return self._client.init_info

    def send(self, version: int, options: Mapping[str, Any], deliver: Outbox) -> None:
        """See `Sender.send`. Raises on every rank if engines could not be reached."""
        with together(self._world):
            self._client.begin(deliver)
            self._engine.send_weights()
            self._client.end()

    def close(self) -> None:
        self._engine.shutdown()


class OutboxClient:
    """vLLM's ``VLLMWeightSyncClient`` interface. Forwards only update messages to the engines: the controller opens,
    begins and finishes updates.

    Attributes:
        init_info: passed to engines.
    """

    def __init__(self) -> None:
        self.init_info: dict[str, Any] = {}
        self._outbox: Outbox | None = None
        self._error: Exception | None = None

    def begin(self, outbox: Outbox) -> None:
        """Deliver through ``outbox`` from now on."""
        self._outbox, self._error = outbox, None

    def end(self) -> None:
        """Raise a delivery error. Not earlier: the other ranks run to the end of the update in lockstep."""
        if self._error is not None:
            raise self._error

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.init_info = init_info

    def start_weight_update(self) -> None:
        """No-op: the controller has begun the update."""

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        """Deliver a message and wait until all engines have copied from the buffer."""
        assert self._outbox is not None, "only during an update"
        assert isinstance(update_info, dict), "vLLM's trainer engine for CUDA IPC sends one message for all engines"
        if self._error is None:
            try:
                self._outbox.post(_plain(update_info)).wait()
            except Exception as e:
                self._error = e

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """No-op: the controller finishes the update."""


def _plain(update_info: Mapping[str, Any]) -> dict[str, Any]:
    """Convert to a message without objects: handles contain classes and are pickled, a form that vLLM reads too."""
    message = {key: value for key, value in update_info.items() if value is not None}
    handles = message.pop("ipc_handles")
    return message | {"ipc_handles_pickled": base64.b64encode(pickle.dumps(handles)).decode()}

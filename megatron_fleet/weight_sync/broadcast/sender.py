"""Trainer side of the ``gloo`` and ``nccl`` transports: the first replica gathers, rank 0 broadcasts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from megatron_fleet.config.errors import UserError
from megatron_fleet.platform.communicator import Communicator, together
from megatron_fleet.weight_sync.base import Outbox
from megatron_fleet.weight_sync.broadcast.group import GlooGroup, GroupBroken, NcclGroup, Rendezvous, UpdateGroup, pack
from megatron_fleet.weight_sync.buckets import BucketLayout, make_buckets, source_groups, stored_parts, stream_buckets
from megatron_fleet.weight_sync.engine_format import EngineFormat
from megatron_fleet.weights.exchange import FormattedSource, WeightSource


class BroadcastSender:
    """`weight_sync.base.Sender`. Options of `prepare`: ``address`` of rank 0's host, as reachable by engines.

    Each `prepare` opens a new rendezvous for one `send`. Rank 0 posts ``{"broken": reason}`` if engines were lost
    during an update; that is for the controller and not an error of the trainer.
    """

    group: ClassVar[type[UpdateGroup]]

    def __init__(self, source: WeightSource, world: Communicator, device: torch.device, form: EngineFormat) -> None:
        self._weights, self._world, self._device = FormattedSource(source, form), world, device
        self._replica = source.place.replica
        self._buckets = stored_parts(make_buckets(source_groups(source)), form)
        self._layout = BucketLayout(self._buckets)
        self._rendezvous: Rendezvous | None = None
        self._group: UpdateGroup | None = None

    def prepare(self, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """Open a rendezvous; return its address for engines. Raises UserError if rank 0 cannot listen there."""
        self.close()
        with together(self._world):
            if self._world.rank == 0:
                self._rendezvous = _listen(options["address"], json.dumps(self._layout.describe()))
        return {} if self._rendezvous is None else self._rendezvous.init_info

    def send(self, version: int, options: Mapping[str, Any], deliver: Outbox) -> None:
        broken = ""
        with together(self._world):
            if self._replica == 0:
                try:
                    consume = self._broadcast if self._world.rank == 0 else None
                    stream_buckets(self._weights, self._buckets, consume)
                except GroupBroken as e:
                    broken = str(e)
                    self.close()
                except BaseException:
                    self.close()  # so that engines stop waiting
                    raise
        if broken:
            deliver.post({"broken": broken}).wait()

    def close(self) -> None:
        if self._group is not None:
            self._group.close()
        self._group = self._rendezvous = None

    def _broadcast(self, bucket: int, tensors: list[torch.Tensor]) -> None:
        if bucket == 0:
            if self._rendezvous is None:
                raise RuntimeError("weights cannot be sent before each prepare")
            size = self._rendezvous.meet()
            if size > 1:
                self._group = self.group(self._rendezvous.store, 0, size, self._rendezvous.address, self._device)
        if self._group is not None:  # otherwise there is no engine
            self._group.broadcast(pack(self._layout, bucket, tensors, self._device))


class GlooSender(BroadcastSender):
    """The sender of ``gloo``; weights on a CUDA device are copied to the host."""

    group = GlooGroup

    def __init__(self, source: WeightSource, world: Communicator, device: torch.device, form: EngineFormat) -> None:
        super().__init__(source, world, torch.device("cpu"), form)


class NcclSender(BroadcastSender):
    """The sender of ``nccl``."""

    group = NcclGroup


def _listen(address: str, layout: str) -> Rendezvous:
    try:
        return Rendezvous(address, layout)
    except OSError as e:
        raise UserError(
            f"cluster address {address}: the host of the trainer's rank 0 cannot listen there ({e.strerror}); give an "
            f"address of that host."
        ) from None

"""Engine side of the ``gloo`` and ``nccl`` transports; runs in vLLM's workers only."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass
from functools import partial
from typing import ClassVar

import torch
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo

from megatron_fleet.weight_sync.broadcast.group import (
    GlooGroup,
    GroupBroken,
    Membership,
    NcclGroup,
    UpdateGroup,
    packed_bytes,
    unpack,
)
from megatron_fleet.weight_sync.buckets import BucketLayout, parse_buckets, prefetch
from megatron_fleet.weight_sync.reloading import ReloadingEngine, begin_reload, check_names

log = logging.getLogger(__name__)


@dataclass
class BroadcastInitInfo(WeightTransferInitInfo):
    """Address at which rank 0 of the trainer waits for the members of the next update."""

    address: str
    port: int
    secret: str


@dataclass
class BroadcastUpdateInfo(WeightTransferUpdateInfo):
    """Empty: the layout is at the rendezvous."""


class BroadcastEngine(ReloadingEngine):
    """Receives a bucket while the previous one is being loaded."""

    init_info_cls = BroadcastInitInfo
    update_info_cls = BroadcastUpdateInfo
    group: ClassVar[type[UpdateGroup]]

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self._membership: Membership | None = None
        self._broken_off = False

    def init_transfer_engine(self, init_info: BroadcastInitInfo) -> None:
        """Register for one update. Raises ValueError if it would lack tensors of the engine's folder."""
        membership = Membership(**asdict(init_info))
        described = json.loads(membership.layout)
        check_names(self, described["names"])
        self._layout = BucketLayout(parse_buckets(**described))
        membership.register()
        self._membership = membership

    def start_weight_update(self) -> None:
        self._broken_off = False
        super().start_weight_update()

    def receive_weights(self, update_info: BroadcastUpdateInfo) -> None:
        """Receive and load all buckets.

        A broken group is not an error of this engine: it is then ready to load everything again in this update, or
        fails when asked to finish.

        Raises:
            DamagedBucket: a checksum differs.
        """
        if self._membership is None:
            raise RuntimeError(f"{type(self).__name__}: update_weights before init_weight_transfer_engine")
        if self._broken_off:
            begin_reload(self)
        membership, self._membership = self._membership, None
        group: UpdateGroup | None = None
        try:
            size = membership.meet()
            group = self.group(membership.store, membership.number, size, membership.own_address, self.device)
            self.load_buckets(prefetch(partial(self._received, group), len(self._layout.buckets)))
        except GroupBroken as e:
            self._broken_off = True
            log.warning("the weight update was aborted: %s", e)
        finally:
            if group is not None:
                group.close()

    def _received(self, group: UpdateGroup, bucket: int) -> list[tuple[str, torch.Tensor]]:
        memory = torch.empty(packed_bytes(self._layout, bucket), dtype=torch.uint8, device=self.device)
        group.broadcast(memory)
        return unpack(self._layout, bucket, memory)


class GlooEngine(BroadcastEngine):
    """Engine side of the ``gloo`` transport."""

    group = GlooGroup

    def _received(self, group: UpdateGroup, bucket: int) -> list[tuple[str, torch.Tensor]]:
        memory = torch.empty(packed_bytes(self._layout, bucket), dtype=torch.uint8)
        group.broadcast(memory)
        return unpack(self._layout, bucket, memory)


class NcclEngine(BroadcastEngine):
    """Engine side of the ``nccl`` transport."""

    group = NcclGroup

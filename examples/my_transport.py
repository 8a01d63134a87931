"""A transport of your own: `mfleet train rollout.engine.transport=my_transport:timed_shm` (see README.md)."""

from __future__ import annotations

import logging
import time
from dataclasses import replace

from megatron_fleet.weight_sync.base import WeightReceiver, WeightSender
from megatron_fleet.weight_sync.registry import TRANSPORTS, TransportClasses
from megatron_fleet.weight_sync.shm.controller import ShmTransport

log = logging.getLogger(__name__)


class TimedShm(ShmTransport):
    """The controller's half: shared memory as ever, and a line in the log for each update.

    The other halves are a `Sender`, which runs in the trainer's ranks, and a `WeightTransferEngine` of vLLM, which runs
    in the engines; here they are those of `shm`.
    """

    async def sync(self, trainer: WeightSender, engines: WeightReceiver, version: int) -> None:
        began = time.perf_counter()
        await super().sync(trainer, engines, version)
        log.warning("weights of version %d took %.3f s", version, time.perf_counter() - began)


def timed_shm() -> TransportClasses:
    """The three halves, each as `module:Class`, imported where it is used."""
    return replace(TRANSPORTS["shm"], controller="my_transport:TimedShm")

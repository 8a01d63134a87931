"""Controller side of the ``shm`` transport: owns the shared memory and counts the rounds. Nothing here imports torch.

The memory is an anonymous file (memfd) of the controller that other processes open through ``/proc``. It outlives the
trainer: engines that restart while there is no trainer load the last version from it. It has no name to clean up: the
kernel frees it with its last user, even if that process is killed.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np

from megatron_fleet.config.errors import UserError
from megatron_fleet.weight_sync.base import WeightReceiver, WeightSender
from megatron_fleet.weight_sync.shm.board import Board


class ShmTransport:
    """`weight_sync.base.Transport`."""

    name = "shm"
    lasting = True

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._memory: HeldMemory | None = None
        self._round = 0
        self._opened: weakref.WeakSet[WeightReceiver] = weakref.WeakSet()

    async def sync(self, trainer: WeightSender, engines: WeightReceiver, version: int) -> None:
        """See `Transport.sync`.

        Raises:
            UserError: not enough memory, or the trainer is on another host.
        """
        memory = await self._prepare(trainer)
        if engines not in self._opened:
            await engines.open_transport(memory.init_info)
            self._opened.add(engines)
        self._round += 1
        message = {"round": self._round}
        await engines.begin_update()
        loading = asyncio.ensure_future(engines.load(message))
        try:
            # Also if no engine is left to load: the next round must not begin before the writers have finished.
            await trainer.send_weights(version, message, _deliver_nothing)
        except BaseException:
            memory.board.abandon(self._round)
            await asyncio.gather(loading, return_exceptions=True)
            raise
        await loading
        await engines.finish_update(version, message)

    def close(self) -> None:
        if self._memory is not None:
            self._memory.close()
            self._memory = None

    async def _prepare(self, trainer: WeightSender) -> HeldMemory:
        """The memory, mapped by ``trainer``, which may have been restarted."""
        while True:
            held = self._memory
            known = {} if held is None else {"key": held.key, "path": held.path}
            wanted = await trainer.prepare_weights(self.name, known)
            if held is not None and wanted["key"] == held.key:
                return held
            self.close()
            self._opened.clear()
            self._memory = HeldMemory(**wanted)


class HeldMemory:
    """Shared memory of one layout.

    Attributes:
        key: identifies the layout.
        path: file that other processes of this user on this host open.
        init_info: passed to engines.
    """

    def __init__(self, key: str, nbytes: int, buckets: int, writers: int, layout: Mapping[str, Any]) -> None:
        """Reserve the memory. Raises UserError if there is not enough."""
        self.key = key
        self._fd = os.memfd_create("megatron_fleet-weights", os.MFD_CLOEXEC)
        try:
            # Reserved now, because running out of memory later would be a SIGBUS in the writing process.
            os.posix_fallocate(self._fd, 0, nbytes)
        except OSError as e:
            os.close(self._fd)
            raise UserError(
                f"weight transfer needs {nbytes / 2**20:.0f} MiB of shared memory on this host and got none "
                f"({e.strerror}); free memory or use a smaller model.dtype."
            ) from None
        self.path = f"/proc/{os.getpid()}/fd/{self._fd}"
        self.init_info = {"path": self.path, **layout}
        mapped = mmap.mmap(self._fd, Board.nbytes(buckets, writers))
        self.board = Board(np.frombuffer(mapped, np.uint8), buckets, writers)

    def close(self) -> None:
        """Release the memory; processes that have mapped it keep it."""
        os.close(self._fd)


async def _deliver_nothing(message: Mapping[str, Any]) -> None:
    raise AssertionError(f"ranks have no messages for engines with shm, and sent {message}")

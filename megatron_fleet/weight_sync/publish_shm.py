"""Publishing through shared memory: trainer ranks write, engines on the same host load, both at the same time."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import torch

from megatron_fleet.config.errors import UserError
from megatron_fleet.platform.communicator import Communicator, PeerError, together
from megatron_fleet.weight_sync.shared_buffer import (
    ENCODED,
    SUMMED,
    WRITTEN,
    Board,
    RoundLost,
    SharedLayout,
    aligned,
    checksum,
    make_buckets,
    map_memory,
    view_in,
)
from megatron_fleet.weight_sync.weight_client import WeightClient
from megatron_fleet.weight_sync.wire import Wire
from megatron_fleet.weights.source import ParamMeta, Place


class ShardedSource(Protocol):
    """What a `MegatronWeightSource` is asked for here."""

    @property
    def place(self) -> Place: ...

    def metadata(self) -> list[ParamMeta]: ...

    def groups(self) -> list[list[str]]: ...

    def write_local(self, out: Mapping[str, torch.Tensor]) -> None: ...


class ShmPublisher:
    """The ranks of the first replica write the parts they own, all engines map the same memory.

    The memory holds the whole model, not a few buckets at a time: an engine that starts again between two versions
    takes the last one from it, which nobody else keeps in the form that engines load. It is an anonymous file (memfd)
    of rank 0, reached by others through ``/proc``. It has no name to leave behind: the kernel frees it with its last
    user, even when that one is killed.
    """

    def __init__(
        self, source: ShardedSource, client: WeightClient | None, world: Communicator, wire: Wire | None = None
    ) -> None:
        """Collective over ``world``.

        Args:
            client: needed on rank 0 only.
            wire: the form in which tensors travel; ``None``: as they are.

        Raises:
            UserError: not enough memory, or the first replica spans several hosts; on every rank.
        """
        self._source, self._client, self._world = source, client, world
        self._wire = wire or Wire()
        self._writers = [rank for rank, replica in enumerate(world.all_gather(source.place.replica)) if replica == 0]
        metas = {meta.name: meta for meta in source.metadata()}
        buckets = make_buckets([[metas[name] for name in group] for group in source.groups()])
        self._buckets = buckets
        scratch = max(sum(self._scratch_bytes(meta) for meta in bucket) for bucket in buckets)
        parts = [[part for meta in bucket for part in self._wire.parts(meta)] for bucket in buckets]
        self._layout = SharedLayout(parts, len(self._writers), scratch)
        self._round = 0
        self._fd: int | None = None
        path = ""
        with together(world):
            if world.rank == 0:
                path = self._allocate(self._layout.nbytes)
        path = world.all_gather(path)[0]
        with together(world):
            self._memory: torch.Tensor | None = self._map(path)
        self._init_info: dict[str, Any] | None = {"path": path, **self._layout.describe()}

    def publish(self, version: int) -> None:
        """See `Publisher.publish`. Raises on every rank when one of them, or an engine, failed."""
        if self._memory is None:
            raise RuntimeError("publish() after close()")
        self._round += 1
        lost = None
        # The closing agreement also keeps fast ranks from writing the next version while engines still read this one.
        with together(self._world):
            try:
                if self._world.rank in self._writers:
                    self._publish(self._memory, version)
            except RoundLost as e:  # the rank that it was lost on tells why
                lost = str(e)
        if any(reasons := self._world.all_gather(lost)):
            raise PeerError(next(reason for reason in reasons if reason))

    def close(self) -> None:
        """See `Publisher.close`."""
        self._memory = None
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _publish(self, memory: torch.Tensor, version: int) -> None:
        board = Board(memory, len(self._buckets), len(self._writers))
        if self._world.rank != 0:
            self._write(board, memory)
            return
        with ThreadPoolExecutor(1) as pool:
            sent = pool.submit(self._send, board, version)
            self._write(board, memory)
            sent.result()

    def _send(self, board: Board, version: int) -> None:
        assert self._client is not None, "rank 0 publishes and needs a client"
        if self._init_info is not None:
            self._client.init_weight_transfer_engine(self._init_info)
            self._init_info = None
        self._client.start_weight_update()
        self._client.update_weights({"round": self._round})
        # The client may survive the loss of all engines: then nobody else has waited for the writers.
        board.wait_complete(self._round)
        self._client.finish_weight_update(str(version))

    def _write(self, board: Board, memory: torch.Tensor) -> None:
        me = self._writers.index(self._world.rank)
        try:
            board.begin(me, self._round)
            for bucket in range(len(self._buckets)):
                self._write_bucket(board, memory, bucket, me)
        except BaseException:
            board.abandon(self._round)
            raise

    def _write_bucket(self, board: Board, memory: torch.Tensor, bucket: int, me: int) -> None:
        number = self._round
        ready = {slot.meta.name: view_in(memory, slot.offset, slot.meta) for slot in self._layout.buckets[bucket]}
        raw = self._scratch(memory, bucket)
        self._source.write_local({m.name: (raw if m.name in raw else ready)[m.name] for m in self._buckets[bucket]})
        board.mark(WRITTEN, bucket, me, number)
        board.wait(WRITTEN, bucket, number)
        if raw:
            for meta in [m for m in self._buckets[bucket] if m.name in raw][me :: len(self._writers)]:
                coded = self._wire.encode(meta.name, raw[meta.name])
                for part, values in zip(self._wire.parts(meta), coded, strict=True):
                    ready[part.name].copy_(values)
            board.mark(ENCODED, bucket, me, number)
            board.wait(ENCODED, bucket, number)
        board.checksums[bucket, me] = checksum(memory[slice(*self._layout.piece(bucket, me))])
        board.mark(SUMMED, bucket, me, number)

    def _scratch_bytes(self, meta: ParamMeta) -> int:
        return aligned(2 * math.prod(meta.shape)) if self._wire.is_quantised(meta.name) else 0

    def _scratch(self, memory: torch.Tensor, bucket: int) -> dict[str, torch.Tensor]:
        """Room for the tensors of a bucket that are quantised, as BF16."""
        views, at = {}, self._layout.scratch
        for meta in self._buckets[bucket]:
            if self._wire.is_quantised(meta.name):
                views[meta.name] = view_in(memory, at, ParamMeta(meta.name, torch.bfloat16, meta.shape))
                at += self._scratch_bytes(meta)
        return views

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

    def _map(self, path: str) -> torch.Tensor:
        if self._world.rank not in self._writers:
            return torch.empty(0, dtype=torch.uint8)
        try:
            return map_memory(path, self._layout.nbytes)
        except RuntimeError as e:
            raise UserError(
                f"the shared weight buffer {path} of rank 0 cannot be mapped ({e}); all ranks of one replica must run "
                f"on one host."
            ) from None

"""Trainer side of the ``shm`` transport: ranks of the first replica write what they own, encoded, without gathering.

The shared memory has the board, the buckets, and the writers' scratch space, which is for quantised tensors of which a
rank's box ends inside a block: they are put together there as BF16 and then encoded.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megatron_fleet.config.errors import UserError
from megatron_fleet.platform.communicator import Communicator, PeerError, together
from megatron_fleet.weight_sync.base import Outbox
from megatron_fleet.weight_sync.buckets import (
    BucketLayout,
    aligned,
    checksum,
    make_buckets,
    parse_buckets,
    source_groups,
    stored_parts,
    view_in,
)
from megatron_fleet.weight_sync.engine_format import EngineFormat
from megatron_fleet.weight_sync.shm.board import ENCODED, SUMMED, WRITTEN, Board, RoundLost
from megatron_fleet.weights.exchange import FormattedSource, ParamMeta, WeightSource


class SharedLayout(BucketLayout):
    """A `BucketLayout` that follows a board.

    Attributes:
        writers: number of ranks that write.
        scratch: offset of the writers' scratch space.
        nbytes: total size of the memory.
    """

    def __init__(self, buckets: Sequence[Sequence[ParamMeta]], writers: int, scratch_bytes: int = 0) -> None:
        super().__init__(buckets, start=Board.nbytes(len(buckets), writers))
        self.writers = writers
        self.scratch = self.end
        self._scratch_bytes = scratch_bytes
        self.nbytes = self.scratch + scratch_bytes

    def describe(self) -> dict[str, Any]:
        """Describe the layout as plain values, for `parse_layout`."""
        return super().describe() | {"writers": self.writers, "scratch_bytes": self._scratch_bytes}

    def piece(self, bucket: int, writer: int) -> tuple[int, int]:
        """Byte range of a bucket whose checksum this writer computes."""
        start, end = self.spans[bucket]
        step = aligned(-(-(end - start) // self.writers))
        return min(start + writer * step, end), min(start + (writer + 1) * step, end)

    def board(self, memory: torch.Tensor) -> Board:
        """The board at the start of mapped memory."""
        return Board(memory.numpy(), len(self.buckets), self.writers)


def parse_layout(described: Mapping[str, Any]) -> SharedLayout:
    """Rebuild the layout from `SharedLayout.describe`. Raises ValueError if the lists are inconsistent."""
    lists = dict(described)
    writers, scratch_bytes = lists.pop("writers"), lists.pop("scratch_bytes")
    return SharedLayout(parse_buckets(**lists), writers, scratch_bytes)


def map_memory(path: str, nbytes: int) -> torch.Tensor:
    """Map the whole file as shared uint8 memory ``[nbytes]``. Raises RuntimeError if it cannot be mapped."""
    return torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8)


class ShmSender:
    """`weight_sync.base.Sender`. Options of `prepare`: ``key`` and ``path`` of the controller's memory; of `send`:
    ``round``."""

    def __init__(self, source: WeightSource, world: Communicator, device: torch.device, form: EngineFormat) -> None:
        """Collective over ``world``."""
        self._weights, self._world, self._form = FormattedSource(source, form), world, form
        self._writers = [rank for rank, replica in enumerate(world.all_gather(source.place.replica)) if replica == 0]
        groups = source_groups(source)
        # The first group (the embedding, often larger than a layer) comes last so that engines can start sooner.
        self._buckets = make_buckets([*groups[1:], *groups[:1]])
        scratch = max(sum(self._scratch_bytes(meta) for meta in bucket) for bucket in self._buckets)
        self._layout = SharedLayout(stored_parts(self._buckets, form), len(self._writers), scratch)
        self._description = self._layout.describe()
        self._key = hashlib.sha256(json.dumps(self._description).encode()).hexdigest()
        self._path = ""
        self._memory: torch.Tensor | None = None

    def prepare(self, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """Map the memory if it has the right layout; otherwise return the layout.

        Raises:
            UserError: the first replica spans several hosts; raised on every rank.
        """
        if options.get("key") != self._key:
            sizes = {"nbytes": self._layout.nbytes, "buckets": len(self._buckets), "writers": len(self._writers)}
            return {"key": self._key, **sizes, "layout": self._description}
        with together(self._world):
            if options["path"] != self._path and self._world.rank in self._writers:
                self._memory = self._map(options["path"])
                self._path = options["path"]
        return {"key": self._key}

    def send(self, version: int, options: Mapping[str, Any], deliver: Outbox) -> None:
        """Write all tensors in round ``options["round"]``. Raises on every rank if any of them fails."""
        lost = None
        with together(self._world):
            try:
                if self._world.rank in self._writers:
                    if self._memory is None:
                        raise RuntimeError("weights cannot be sent before the memory is prepared")
                    self._write(self._memory, options["round"])
            except RoundLost as e:  # the rank that lost it has the reason
                lost = str(e)
        if any(reasons := self._world.all_gather(lost)):
            raise PeerError(next(reason for reason in reasons if reason))

    def close(self) -> None:
        self._memory, self._path = None, ""

    def _write(self, memory: torch.Tensor, number: int) -> None:
        me = self._writers.index(self._world.rank)
        board = self._layout.board(memory)
        try:
            board.begin(me, number)
            for bucket in range(len(self._buckets)):
                self._write_bucket(board, memory, bucket, me, number)
        except BaseException:
            board.abandon(number)
            raise

    def _write_bucket(self, board: Board, memory: torch.Tensor, bucket: int, me: int, number: int) -> None:
        ready = dict(self._layout.tensors(bucket, memory))
        raw = self._scratch(memory, bucket)
        self._weights.write_local([meta.name for meta in self._buckets[bucket]], ready | raw)
        board.mark(WRITTEN, bucket, me, number)
        board.wait(WRITTEN, bucket, number)
        if raw:
            for meta in [m for m in self._buckets[bucket] if m.name in raw][me :: len(self._writers)]:
                coded = self._form.encode(meta.name, raw[meta.name])
                for part, values in zip(self._form.parts(meta), coded, strict=True):
                    ready[part.name].copy_(values)
            board.mark(ENCODED, bucket, me, number)
            board.wait(ENCODED, bucket, number)
        board.checksums[bucket, me] = checksum(memory[slice(*self._layout.piece(bucket, me))])
        board.mark(SUMMED, bucket, me, number)

    def _scratch_bytes(self, meta: ParamMeta) -> int:
        return aligned(2 * math.prod(meta.shape)) if meta.name in self._weights.whole_first else 0

    def _scratch(self, memory: torch.Tensor, bucket: int) -> dict[str, torch.Tensor]:
        """Scratch space for the tensors of a bucket that are put together before they are encoded, as BF16."""
        views, at = {}, self._layout.scratch
        for meta in self._buckets[bucket]:
            if meta.name in self._weights.whole_first:
                views[meta.name] = view_in(memory, at, ParamMeta(meta.name, torch.bfloat16, meta.shape))
                at += self._scratch_bytes(meta)
        return views

    def _map(self, path: str) -> torch.Tensor:
        try:
            return map_memory(path, self._layout.nbytes)
        except RuntimeError as e:
            raise UserError(
                f"the controller's shared memory {path} cannot be mapped ({e}); with rollout.engine.transport=shm the "
                f"controller and all ranks of the first replica must run on one host."
            ) from None

"""Weights in buckets: tensors of whole layers laid out consecutively in uint8 memory, verified by a checksum."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from megatron_fleet.weights.exchange import Form, ParamMeta, WeightSource

ALIGNMENT = 256
"""Offsets are multiples of this many bytes, so that any dtype can be viewed in place."""
BUCKET_BYTES = 64 << 20
"""Small layers share a bucket up to this size. Smaller buckets cost more round trips, larger ones delay the start."""
_BLOCK_WORDS = 4096

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Slot:
    """A tensor and its byte offset in the memory."""

    meta: ParamMeta
    offset: int


class BucketLayout:
    """Position of each tensor; deterministic, so the same arguments give the same layout everywhere.

    Attributes:
        buckets: slots of each bucket.
        spans: start and end offset of each bucket, both aligned.
        end: end offset of the last bucket.
    """

    def __init__(self, buckets: Sequence[Sequence[ParamMeta]], start: int = 0) -> None:
        self.buckets: list[list[Slot]] = []
        self.spans: list[tuple[int, int]] = []
        self.end = aligned(start)
        for metas in buckets:
            first = end = self.end
            slots = []
            for meta in metas:
                slots.append(Slot(meta, aligned(end)))
                end = slots[-1].offset + meta.nbytes
            self.end = aligned(end)
            self.buckets.append(slots)
            self.spans.append((first, self.end))

    def describe(self) -> dict[str, Any]:
        """Describe the layout as plain values, for `parse_buckets`."""
        metas = [slot.meta for bucket in self.buckets for slot in bucket]
        return {
            "names": [m.name for m in metas],
            "dtype_names": [str(m.dtype).removeprefix("torch.") for m in metas],
            "shapes": [list(m.shape) for m in metas],
            "buckets": [len(bucket) for bucket in self.buckets],
        }

    def tensors(self, bucket: int, memory: torch.Tensor, start: int = 0) -> list[tuple[str, torch.Tensor]]:
        """(name, tensor) of each tensor in a bucket, as views.

        Args:
            memory: uint8 memory whose first byte is byte ``start`` of the layout.
        """
        slots = self.buckets[bucket]
        return [(slot.meta.name, view_in(memory, slot.offset - start, slot.meta)) for slot in slots]


def parse_buckets(
    names: Sequence[str], dtype_names: Sequence[str], shapes: Sequence[Sequence[int]], buckets: Sequence[int]
) -> list[list[ParamMeta]]:
    """Rebuild the buckets from `BucketLayout.describe`. Raises ValueError if the lists are inconsistent."""
    if sum(buckets) != len(names):
        raise ValueError(f"buckets of {sum(buckets)} tensors and {len(names)} names")
    metas = iter(
        ParamMeta(name, getattr(torch, dtype), tuple(shape))
        for name, dtype, shape in zip(names, dtype_names, shapes, strict=True)
    )
    return [[next(metas) for _ in range(count)] for count in buckets]


def aligned(offset: int) -> int:
    """Round up to a multiple of ``ALIGNMENT``."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


def view_in(memory: torch.Tensor, offset: int, meta: ParamMeta) -> torch.Tensor:
    """The tensor at byte ``offset`` of uint8 memory, as a view."""
    return memory[offset : offset + meta.nbytes].view(meta.dtype).view(meta.shape)


def checksum(memory: torch.Tensor) -> int:
    """Fletcher's checksum (1982) of uint8 memory: 64-bit words summed in blocks, the blocks weighted 1, 3, 5…

    Computed modulo 2**64. It detects every change of a single word and misplaced blocks, at memory bandwidth; CRC-32 is
    eight times slower. Does not block other threads.

    Args:
        memory: contiguous, 8-byte aligned, size a multiple of 8 bytes; on any device.
    """
    words = memory.view(torch.int64)
    whole = len(words) // _BLOCK_WORDS * _BLOCK_WORDS
    sums = torch.cat([words[:whole].view(-1, _BLOCK_WORDS).sum(1), words[whole:].sum().reshape(1)])
    weights = torch.arange(1, 2 * len(sums), 2, device=memory.device)
    return int((sums * weights).sum()) % 2**64


def make_buckets(groups: Sequence[Sequence[ParamMeta]]) -> list[list[ParamMeta]]:
    """Merge groups up to ``BUCKET_BYTES``; none is split, since an engine loads a layer when it is complete."""
    buckets: list[list[ParamMeta]] = []
    size = 0
    for group in groups:
        nbytes = sum(meta.nbytes for meta in group)
        if not buckets or size + nbytes > BUCKET_BYTES:
            buckets.append([])
            size = 0
        buckets[-1] += group
        size += nbytes
    return buckets


def source_groups(source: WeightSource) -> list[list[ParamMeta]]:
    """Metadata of a source's tensors, by group."""
    metas = {meta.name: meta for meta in source.metadata()}
    return [[metas[name] for name in group] for group in source.groups()]


def stored_parts(buckets: Sequence[Sequence[ParamMeta]], form: Form) -> list[list[ParamMeta]]:
    """Convert buckets of whole tensors to buckets of their stored parts."""
    return [[part for meta in bucket for part in form.parts(meta)] for bucket in buckets]


def stream_buckets(
    weights: Iterable[tuple[str, torch.Tensor]],
    buckets: Sequence[Sequence[ParamMeta]],
    consume: Callable[[int, list[torch.Tensor]], None] | None,
) -> None:
    """Iterate ``weights`` once, on every rank that gathers; pass each bucket to ``consume`` where it is given.

    They are iterated to their end even if ``consume`` fails, because the other ranks iterate in lockstep.

    Args:
        weights: (name, tensor), as a `FormattedSource` yields them.
        buckets: the same tensors in buckets, in iteration order.
        consume: called with a bucket's number and its tensors.

    Raises:
        Exception: the first one raised by ``consume``, or that of the iteration.
    """
    error: Exception | None = None
    tensors = iter(weights)
    for number, metas in enumerate(buckets):
        bucket: list[torch.Tensor] = []
        for meta in metas:
            name, tensor = next(tensors)
            if consume is None or error is not None:
                continue
            if name != meta.name:
                error = ValueError(f"the weight source yields {name}, and {meta.name} was declared")
            bucket.append(tensor)
        if consume is not None and error is None:
            try:
                consume(number, bucket)
            except Exception as e:
                error = e
    if error is not None:
        raise error


def prefetch(make: Callable[[int], T], count: int, ahead: int = 1) -> Generator[T]:
    """Yield ``make(0)``, ``make(1)``, … in order, computed by one thread up to ``ahead`` items in advance."""
    with ThreadPoolExecutor(1) as pool:
        pending: list[Future[T]] = []
        try:
            for number in range(count):
                pending.append(pool.submit(make, number))
                if len(pending) > ahead:
                    yield pending.pop(0).result()
            for future in pending:
                yield future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

"""Weights in buckets: tensors of whole layers behind each other in uint8 memory, checked by a checksum."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from megatron_fleet.weight_sync.engine_format import EngineFormat, Source
from megatron_fleet.weights.source import ParamMeta

ALIGNMENT = 256
"""Offsets are multiples of this many bytes, so that any dtype can be viewed in place."""
BUCKET_BYTES = 64 << 20
"""Small layers share a bucket up to this size. Smaller ones cost more turns, larger ones begin later."""
_BLOCK_WORDS = 4096

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Slot:
    """One tensor and its first byte in the memory."""

    meta: ParamMeta
    offset: int


class BucketLayout:
    """Where each tensor lies; equal wherever it is made from the same arguments.

    Attributes:
        buckets: the slots of each.
        spans: first byte of each bucket, and the byte after its last; aligned, both.
        end: the byte after the last bucket.
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
        """The layout as plain values, for `parse_buckets`."""
        metas = [slot.meta for bucket in self.buckets for slot in bucket]
        return {
            "names": [m.name for m in metas],
            "dtype_names": [str(m.dtype).removeprefix("torch.") for m in metas],
            "shapes": [list(m.shape) for m in metas],
            "buckets": [len(bucket) for bucket in self.buckets],
        }

    def tensors(self, bucket: int, memory: torch.Tensor, start: int = 0) -> list[tuple[str, torch.Tensor]]:
        """(name, tensor) of a bucket; no copy.

        Args:
            memory: uint8, whose first byte is byte ``start`` of the layout.
        """
        slots = self.buckets[bucket]
        return [(slot.meta.name, view_in(memory, slot.offset - start, slot.meta)) for slot in slots]


def parse_buckets(
    names: Sequence[str], dtype_names: Sequence[str], shapes: Sequence[Sequence[int]], buckets: Sequence[int]
) -> list[list[ParamMeta]]:
    """The buckets that `BucketLayout.describe` described. Raises ValueError when the lists do not fit together."""
    if sum(buckets) != len(names):
        raise ValueError(f"buckets of {sum(buckets)} tensors and {len(names)} names")
    metas = iter(
        ParamMeta(name, getattr(torch, dtype), tuple(shape))
        for name, dtype, shape in zip(names, dtype_names, shapes, strict=True)
    )
    return [[next(metas) for _ in range(count)] for count in buckets]


def aligned(offset: int) -> int:
    """The next multiple of ``ALIGNMENT``."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


def view_in(memory: torch.Tensor, offset: int, meta: ParamMeta) -> torch.Tensor:
    """The tensor that lies at byte ``offset`` of uint8 memory; no copy."""
    return memory[offset : offset + meta.nbytes].view(meta.dtype).view(meta.shape)


def checksum(memory: torch.Tensor) -> int:
    """Fletcher's checksum (1982) of uint8 memory: 64-bit words added in blocks, the blocks with weights 1, 3, 5…

    Of the whole modulo 2**64. It finds every change of one word and blocks in the wrong place, at the speed of memory;
    CRC-32 is eight times as slow. Other threads run meanwhile.

    Args:
        memory: contiguous, a multiple of 8 bytes, aligned to 8, on any device.
    """
    words = memory.view(torch.int64)
    whole = len(words) // _BLOCK_WORDS * _BLOCK_WORDS
    sums = torch.cat([words[:whole].view(-1, _BLOCK_WORDS).sum(1), words[whole:].sum().reshape(1)])
    weights = torch.arange(1, 2 * len(sums), 2, device=memory.device)
    return int((sums * weights).sum()) % 2**64


def make_buckets(groups: Sequence[Sequence[ParamMeta]]) -> list[list[ParamMeta]]:
    """Groups joined up to ``BUCKET_BYTES``; none is split, since an engine loads a layer when it is complete."""
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


def source_groups(source: Source) -> list[list[ParamMeta]]:
    """The metadata of a source's tensors, by its groups."""
    metas = {meta.name: meta for meta in source.metadata()}
    return [[metas[name] for name in group] for group in source.groups()]


def stored_parts(buckets: Sequence[Sequence[ParamMeta]], form: EngineFormat) -> list[list[ParamMeta]]:
    """Buckets of whole tensors as buckets of what these are stored as."""
    return [[part for meta in bucket for part in form.parts(meta)] for bucket in buckets]


def stream_buckets(
    source: Source,
    form: EngineFormat,
    buckets: Sequence[Sequence[ParamMeta]],
    consume: Callable[[int, list[torch.Tensor]], None] | None,
) -> None:
    """Iterate ``source`` once, on every rank that gathers; give each bucket to ``consume`` where there is one.

    The source is iterated to its end even when ``consume`` fails, because the other ranks do so in lockstep.

    Args:
        buckets: of whole tensors, in the order of iteration.
        consume: takes the number of a bucket and its tensors in the engine's stored form.

    Raises:
        Exception: the first that encoding or ``consume`` raised.
    """
    error: Exception | None = None
    tensors = iter(source)
    for number, metas in enumerate(buckets):
        parts: list[torch.Tensor] = []
        for meta in metas:
            name, tensor = next(tensors)
            if consume is None or error is not None:
                continue
            try:
                if name != meta.name:
                    raise ValueError(f"the weight source yields {name}, and {meta.name} was declared")
                parts += form.encode(name, tensor)
            except Exception as e:
                error = e
        if consume is not None and error is None:
            try:
                consume(number, parts)
            except Exception as e:
                error = e
    if error is not None:
        raise error


def prefetch(make: Callable[[int], T], count: int, ahead: int = 1) -> Generator[T]:
    """``make(0)``, ``make(1)``, … in order, made by one thread, up to ``ahead`` of them before they are asked for."""
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

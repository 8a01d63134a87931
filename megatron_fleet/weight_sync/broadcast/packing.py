"""A bucket and its checksum in one buffer, for one broadcast."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_fleet.weight_sync.buckets import ALIGNMENT, BucketLayout, checksum


class DamagedBucket(ValueError):
    """The checksum of a bucket does not match."""


def packed_bytes(layout: BucketLayout, bucket: int) -> int:
    """Size of a packed bucket in bytes."""
    start, end = layout.spans[bucket]
    return end - start + ALIGNMENT


def pack(layout: BucketLayout, bucket: int, tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Pack the tensors of a bucket, in layout order, and their checksum into uint8 memory on ``device``."""
    memory = torch.zeros(packed_bytes(layout, bucket), dtype=torch.uint8, device=device)
    start, end = layout.spans[bucket]
    for (_, place), tensor in zip(layout.tensors(bucket, memory, start), tensors, strict=True):
        place.copy_(tensor)
    total = checksum(memory[: end - start])
    memory[end - start :].view(torch.int64)[0] = total - (1 << 64) if total >> 63 else total
    return memory


def unpack(layout: BucketLayout, bucket: int, memory: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """(name, tensor) of every tensor of a packed bucket, as views. Raises `DamagedBucket`."""
    start, end = layout.spans[bucket]
    declared = int(memory[end - start :].view(torch.int64)[0]) % 2**64
    if checksum(memory[: end - start]) != declared:
        raise DamagedBucket(f"checksum of bucket {bucket} differs")
    return layout.tensors(bucket, memory, start)

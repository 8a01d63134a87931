"""Trainer side of the ``disk`` transport: the first replica gathers, rank 0 writes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from safetensors.torch import save

from megatron_fleet.platform.communicator import Communicator, together
from megatron_fleet.storage.folder import Folder, aligned_buffer
from megatron_fleet.storage.open import open_staging
from megatron_fleet.storage.staging import Staging
from megatron_fleet.weight_sync.base import Outbox
from megatron_fleet.weight_sync.buckets import checksum, make_buckets, source_groups, stored_parts, stream_buckets
from megatron_fleet.weight_sync.disk.manifest import MANIFEST, BucketFile, write_manifest
from megatron_fleet.weight_sync.engine_format import EngineFormat
from megatron_fleet.weights.exchange import FormattedSource, WeightSource


class DiskSender:
    """`weight_sync.base.Sender`. Options of `send`: ``path`` of the folder to write, which must not exist yet."""

    def __init__(self, source: WeightSource, world: Communicator, device: torch.device, form: EngineFormat) -> None:
        self._weights, self._world, self._replica = FormattedSource(source, form), world, source.place.replica
        self._buckets = stored_parts(make_buckets(source_groups(source)), form)

    def prepare(self, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """No-op: there is nothing to prepare."""
        return {}

    def send(self, version: int, options: Mapping[str, Any], deliver: Outbox) -> None:
        """Write a version. Raises UserError on every rank if the disk or the object store fails."""
        staging: Staging | None = None
        with together(self._world):
            if self._world.rank == 0:
                staging = open_staging(options["path"], MANIFEST)
        with together(self._world):
            if staging is not None:
                staging.commit(write_manifest(version, self._write(staging.folder)))
            elif self._replica == 0:
                stream_buckets(self._weights, self._buckets, None)

    def close(self) -> None:
        """See `Sender.close`."""

    def _write(self, folder: Folder) -> list[BucketFile]:
        files: list[BucketFile] = []

        def write(bucket: int, tensors: list[torch.Tensor]) -> None:
            names = [meta.name for meta in self._buckets[bucket]]
            content = save({name: t.contiguous().cpu() for name, t in zip(names, tensors, strict=True)})
            file = f"{bucket:05d}.safetensors"
            files.append(BucketFile(file, len(content), _write_file(folder, file, content), names))

        stream_buckets(self._weights, self._buckets, write)
        return files


def _write_file(folder: Folder, name: str, content: bytes) -> int:
    """Write a file; return its checksum."""
    buffer = aligned_buffer(-(-len(content) // 8) * 8)
    buffer[: len(content)] = content
    writer = folder.create(name, len(content))
    try:
        for at in range(0, len(content), writer.part):
            writer.write_at(at, buffer[at : min(at + writer.part, len(content))])
        writer.commit()
    finally:
        writer.abort()
    return checksum(torch.frombuffer(buffer, dtype=torch.uint8))

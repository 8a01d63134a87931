"""Model and optimizer written as Megatron's ``torch_dist`` checkpoint shards, each rank its own share.

First all ranks describe what each of them will write, and the first one makes the index of it all. Then each rank
writes its file alone, in a thread if its values have been copied to host memory before: nothing is exchanged any more,
and training goes on.
"""

from __future__ import annotations

import hashlib
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from math import prod
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedStateDict, is_main_replica
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import ChainedOptimizer

from megatron_fleet.platform.communicator import TorchCommunicator
from megatron_fleet.trainer.megatron import optimizer_shards
from megatron_fleet.trainer.megatron.offload import HostCopy
from megatron_fleet.trainer.megatron.optimizer_shards import parts
from megatron_fleet.trainer.megatron.state import CONTENT, describe
from megatron_fleet.weights.torch_dist.container import wrap
from megatron_fleet.weights.torch_dist.dtypes import BY_TORCH_NAME
from megatron_fleet.weights.torch_dist.index import COMMON, METADATA, METADATA_JSON, Blob, Chunk, ChunkedTensor
from megatron_fleet.weights.torch_dist.tiling import tiling_fault
from megatron_fleet.weights.torch_dist.writer import common_bytes, metadata_bytes, metadata_json_bytes

_SLICE_BYTES = 16 << 20
"""Bytes that are copied from the device at a time where there is no copy of everything."""

Written = dict[str, dict[str, Any]]
"""Name of each file that a rank has flushed to disk → ``bytes``, ``sha256``."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a tensor that this rank writes.

    Attributes:
        key, dtype, shape: of the whole tensor; ``dtype`` is a safetensors name (``BF16``).
        offsets, sizes: of the box.
        data: its values ``[N]``, row-major, where the model or the optimizer has them.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    data: torch.Tensor


class Save:
    """One rank's share of a checkpoint that is being saved."""

    def __init__(
        self, path: Path, chunks: Sequence[DistributedDataParallel], optimizer: ChainedOptimizer, copy: HostCopy | None
    ) -> None:
        """Describe the share, and copy its values; collective. The folder must be empty or not exist.

        Args:
            copy: memory for the values, which may change then before `write`. ``None``: `write` reads them where they
                are.
        """
        self._path, self._copy = path, copy
        described = [describe(chunk.module) for chunk in chunks]
        self._pieces = [*_model_pieces(described), *_optimizer_pieces(optimizer, described)]
        self._objects = _objects(described)
        self._file = f"__{TorchCommunicator().rank}_0.distcp"
        self._small = self._index(optimizer_shards.settings(optimizer))
        if copy is not None:
            copy.store([_flat(piece.data) for piece in self._pieces])
            if torch.cuda.is_available():
                torch.cuda.synchronize()

    def _index(self, settings: Any) -> dict[str, bytes]:
        """On the first rank the files that describe the whole checkpoint, else nothing.

        Raises:
            ValueError: the ranks do not hold every tensor once.
        """
        at, tensors, objects = 0, [], []
        for piece in self._pieces:
            length = wrap(piece.dtype, piece.sizes).length
            chunk = Chunk(piece.offsets, piece.sizes, self._file, at, length)
            tensors.append((piece.key, piece.dtype, piece.shape, chunk))
            at += length
        for key, content in self._objects.items():
            objects.append((key, Blob(self._file, at, len(content))))
            at += len(content)
        world = TorchCommunicator()
        gathered = world.all_gather((tensors, objects))
        if world.rank != 0:
            return {}
        found: dict[str, tuple[str, tuple[int, ...], list[Chunk]]] = {}
        for key, dtype, shape, chunk in (entry for mine, _ in gathered for entry in mine):
            found.setdefault(key, (dtype, shape, []))[2].append(Chunk(*chunk))
        for key, (_, shape, mine) in found.items():
            if (fault := tiling_fault(shape, mine)) is not None:
                raise ValueError(f"the ranks do not hold {key} once: {fault}")
        whole = {key: ChunkedTensor(dtype, shape, tuple(mine)) for key, (dtype, shape, mine) in found.items()}
        blobs = {key: Blob(*blob) for _, mine in gathered for key, blob in mine}
        return {
            COMMON: common_bytes(content_metadata=CONTENT, optimizer=settings),
            METADATA_JSON: metadata_json_bytes(),
            METADATA: metadata_bytes(whole, {}, blobs),
        }

    def write(self) -> Written:
        """Write this rank's files, flushed to disk. Raises OSError when the disk refuses."""
        self._path.mkdir(parents=True, exist_ok=True)
        written = {name: _write(self._path / name, iter([content])) for name, content in self._small.items()}
        if self._pieces or self._objects:
            written[self._file] = _write(self._path / self._file, self._content())
        return written

    def _content(self) -> Iterator[Any]:
        """Bytes of this rank's file, in order."""
        for piece, values in zip(self._pieces, self._values(), strict=True):
            container = wrap(piece.dtype, piece.sizes)
            yield container.prefix
            for stretch in values:
                yield stretch.numpy().data
            yield container.suffix
        yield from self._objects.values()

    def _values(self) -> Iterator[Iterator[torch.Tensor]]:
        """Bytes of each piece in host memory, uint8, in stretches."""
        if self._copy is not None:
            yield from self._copy.stretches([piece.data.nbytes for piece in self._pieces])
            return
        for piece in self._pieces:
            # A copy on CPUs, too: a storage that NumPy has seen can no longer be offloaded.
            yield (part.to("cpu", copy=True) for part in _flat(piece.data).split(_SLICE_BYTES))


def _model_pieces(described: Sequence[ShardedStateDict]) -> Iterator[Piece]:
    """Parameters and buffers that this rank writes: of equal ones on data-parallel ranks each writes a share."""
    loads: dict[bool, list[int]] = {}
    for entry in (entry for chunk in described for entry in chunk.values() if not isinstance(entry, ShardedObject)):
        if not _is_first(entry.replica_id):
            continue
        # Experts have data-parallel ranks of their own; Megatron marks their parameters so. Buffers are written once.
        expert = not getattr(entry.data, "allreduce", True)
        size = 1
        if isinstance(entry.data, torch.nn.Parameter):
            size = (
                parallel_state.get_expert_data_parallel_world_size()
                if expert
                else parallel_state.get_data_parallel_world_size(with_context_parallel=True)
            )
        load = loads.setdefault(expert, [0] * size) if size > 1 else [0]
        owner = load.index(min(load))
        load[owner] += entry.data.nbytes
        if entry.replica_id[-1] != owner:
            continue
        flat = _plain(entry.data).view(-1)
        for shard, first in parts(entry):
            sizes = (1,) * shard.prepend_axis_num + tuple(shard.data.shape)
            data, dtype = flat[first : first + prod(sizes)], _name(flat.dtype)
            yield Piece(shard.key, dtype, tuple(shard.global_shape), tuple(shard.global_offset), sizes, data)


def _optimizer_pieces(optimizer: ChainedOptimizer, described: Sequence[ShardedStateDict]) -> Iterator[Piece]:
    for box in optimizer_shards.boxes(optimizer, described):
        if box.is_main:
            sizes = tuple(box.data.shape)
            yield Piece(box.key, _name(box.data.dtype), box.shape, box.offsets, sizes, box.data.reshape(-1))


def _objects(described: Sequence[ShardedStateDict]) -> dict[str, bytes]:
    """States of modules besides parameters, as ``torch.save`` writes them; several may share a key."""
    found: dict[str, list[Any]] = defaultdict(list)
    for entry in (entry for chunk in described for entry in chunk.values() if isinstance(entry, ShardedObject)):
        if is_main_replica(entry.replica_id):
            found[entry.unique_key].append(entry.data)
    blobs = {}
    for key, several in found.items():
        buffer = BytesIO()
        torch.save(several, buffer)
        blobs[key] = buffer.getvalue()
    return blobs


def _is_first(replica: Any) -> bool:
    """Whether only data-parallel ranks have copies with lower numbers."""
    return all(number == 0 for number in replica[:-1])


def _plain(data: torch.Tensor) -> torch.Tensor:
    """Values of a parameter; quantised ones are widened."""
    data = data.detach()
    return data.dequantize() if type(data) is not torch.Tensor and hasattr(data, "dequantize") else data


def _name(dtype: torch.dtype) -> str:
    return BY_TORCH_NAME[str(dtype)].name


def _flat(data: torch.Tensor) -> torch.Tensor:
    return data.view(-1).view(torch.uint8)


def _write(path: Path, content: Iterator[Any]) -> dict[str, Any]:
    """Write and flush a file; its size and SHA-256."""
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for part in content:
            digest.update(part)
            file.write(part)
        file.flush()
        os.fsync(file.fileno())
        return {"bytes": file.tell(), "sha256": digest.hexdigest()}

"""Checkpoint folders for these tests: torch's own writer behind a grid of chunks, and ours around given bytes."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from megatron_fleet.weights.torch_dist import container, index, writer
from megatron_fleet.weights.torch_dist.dtypes import BY_TORCH_NAME
from megatron_fleet.weights.torch_dist.index import Blob, CheckpointIndex, Chunk, ChunkedTensor

ALL_DTYPES = sorted(BY_TORCH_NAME)


class Grid(torch.Tensor):
    """A tensor that torch's writer stores in boxes: ``cuts[axis]`` are the offsets at which new ones start."""

    def __new__(cls, tensor: torch.Tensor, cuts: Sequence[Sequence[int]]) -> Grid:
        return torch.Tensor._make_wrapper_subclass(cls, tensor.shape)

    def __init__(self, tensor: torch.Tensor, cuts: Sequence[Sequence[int]]) -> None:
        self.tensor = tensor
        self.cuts = cuts

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        spans = [
            [(a, b - a) for a, b in zip((0, *cuts), (*cuts, size), strict=True)]
            for cuts, size in zip(self.cuts, self.tensor.shape, strict=True)
        ]
        return [
            ChunkStorageMetadata(torch.Size(o for o, _ in box), torch.Size(s for _, s in box))
            for box in product(*spans)
        ]

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.tensor)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.tensor.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    @classmethod
    def __torch_dispatch__(cls, function: Any, *_: Any) -> None:
        raise AssertionError(f"{function} on a grid")

    def __get_tensor_shard__(self, at: MetadataIndex) -> torch.Tensor:
        (chunk,) = (c for c in self.__create_chunk_list__() if c.offsets == at.offset)
        return self.tensor[tuple(slice(o, o + s) for o, s in zip(chunk.offsets, chunk.sizes, strict=True))]


def random_tensor(dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    """Random bits, so NaNs and subnormals too."""
    generator = torch.Generator().manual_seed(seed)
    count = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (count,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).view(shape)


def raw_bytes(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


class ObjectsAsTheyAre(dcp.DefaultSavePlanner):
    """Stores a BytesIO's content, as Megatron's planner does; torch's own pickles the BytesIO."""

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        return object


def save_with_torch(folder: Path, state: dict[str, Any]) -> None:
    """A checkpoint by torch's writer, with the files that Megatron adds."""
    dcp.save(state, checkpoint_id=folder, planner=ObjectsAsTheyAre(), no_dist=True)
    (folder / index.METADATA_JSON).write_bytes(writer.metadata_json_bytes())
    (folder / index.COMMON).write_bytes(writer.common_bytes(iteration=7))


def save_with_ours(
    folder: Path,
    tensors: Mapping[str, Grid],
    aliases: Mapping[str, str] | None = None,
    extra_states: Sequence[str] = (),
) -> None:
    """A checkpoint by our writer."""
    folder.mkdir()
    stored: dict[str, ChunkedTensor] = {}
    with (folder / "__0_0.distcp").open("wb") as f:
        for key, grid in tensors.items():
            dtype = BY_TORCH_NAME[str(grid.tensor.dtype)].name
            chunks = []
            for box in grid.__create_chunk_list__():
                around = container.wrap(dtype, tuple(box.sizes))
                start = f.tell()
                part = grid.__get_tensor_shard__(MetadataIndex(key, box.offsets))
                f.write(around.prefix + raw_bytes(part) + around.suffix)
                assert f.tell() == start + around.length
                chunks.append(Chunk(tuple(box.offsets), tuple(box.sizes), "__0_0.distcp", start, around.length))
            stored[key] = ChunkedTensor(dtype, tuple(grid.tensor.shape), tuple(chunks))
        blob = Blob("__0_0.distcp", f.tell(), f.write(writer.extra_state_blob()))
    metadata = writer.metadata_bytes(stored, aliases or {}, dict.fromkeys(extra_states, blob))
    (folder / index.METADATA).write_bytes(metadata)
    (folder / index.METADATA_JSON).write_bytes(writer.metadata_json_bytes())
    (folder / index.COMMON).write_bytes(writer.common_bytes())


def reader(folder: Path) -> tuple[index.Read, dict[str, int]]:
    """Reader of local files for the index."""

    def read(name: str, offset: int, length: int | None) -> bytes:
        with (folder / name).open("rb") as f:
            f.seek(offset)
            return f.read() if length is None else f.read(length)

    files = (path for path in folder.rglob("*") if path.is_file())
    return read, {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}


def read_folder(folder: Path) -> CheckpointIndex:
    return index.read_index(*reader(folder), where="run")


def stored_parts(folder: Path, tensor: ChunkedTensor) -> Iterator[tuple[Chunk, bytes]]:
    """Every chunk with its raw bytes, taken from where ``data_span`` says they are."""
    read, _ = reader(folder)
    for chunk in tensor.chunks:
        head = read(chunk.file, chunk.offset, min(chunk.length, container.HEAD_BYTES))
        span = container.data_span(head, chunk.length, chunk.file)
        assert (span.dtype, span.shape) == (tensor.dtype, chunk.sizes)
        yield chunk, read(chunk.file, chunk.offset + span.offset, span.nbytes)


def torch_saved(value: Any) -> bytes:
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()

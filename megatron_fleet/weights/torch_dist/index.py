"""Index of a checkpoint's chunks: its ``.metadata``, validated and converted to plain form."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

from megatron_fleet.config.errors import UserError
from megatron_fleet.weights.torch_dist import archive
from megatron_fleet.weights.torch_dist.dtypes import BY_TORCH_NAME, DTYPES
from megatron_fleet.weights.torch_dist.pickle_reader import BadPickle, Opaque, unpickle
from megatron_fleet.weights.torch_dist.tiling import tiling_fault

METADATA = ".metadata"
METADATA_JSON = "metadata.json"
COMMON = "common.pt"
COMMON_OBJECT = "common_state/shard_0_1"
"""Key of the common state inside the data files, used by Megatron-Core 0.19 and later."""

_METADATA_NAMES = ("torch", "megatron", "nvidia_resiliency_ext", "collections", "pathlib", "io", "builtins.set")
_COMMON_NAMES = (
    *_METADATA_NAMES,
    *("argparse", "copyreg", "enum", "numpy", "_codecs", "signal", "transformer_engine", "types"),
    *(f"builtins.{name}" for name in ("bytearray", "bytes", "complex", "frozenset", "getattr", "object", "slice")),
)
_LARGEST_METADATA = 1 << 30
_LARGEST_COMMON = 16 << 20
"""Maximum bytes read of the common state: its description, not the tensors that may follow it."""
_LARGEST_SIZE = 1 << 63
_OPTIMIZER = re.compile(r"(chained_\d+\.)?optimizer\.")

Read = Callable[[str, int, int | None], bytes]
"""(file name in the checkpoint's folder, offset, length or None for the rest) → its bytes."""


class Chunk(NamedTuple):
    """A box of a tensor and the container that holds it: ``length`` bytes at ``offset`` of ``file``."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    offset: int
    length: int


class Blob(NamedTuple):
    """An object, as ``torch.save`` wrote it: ``length`` bytes at ``offset`` of ``file``."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class ChunkedTensor:
    """A tensor tiled by its chunks. ``dtype`` is a safetensors name (``BF16``)."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True)
class CheckpointIndex:
    """Contents of a checkpoint.

    Attributes:
        tensors: key → tensor, without the optimizer's.
        objects: key (``…_extra_state/shard_0_1``) → location, without the optimizer's and the common state.
        optimizer: keys of the optimizer, which are not validated.
        common: the non-tensor state (``iteration``, ``content_metadata``, ``args``…); anything but plain values is
            ``Opaque``.
    """

    tensors: dict[str, ChunkedTensor]
    objects: dict[str, Blob]
    optimizer: tuple[str, ...]
    common: dict[str, Any]


def read_index(read: Read, sizes: Mapping[str, int], where: str) -> CheckpointIndex:
    """Read the index of the checkpoint in a folder. Reads only ``.metadata``, ``metadata.json`` and the common state.

    Args:
        sizes: name → bytes of the files in the folder.
        where: the folder, for messages.

    Raises:
        UserError: names the file, the tensor and the fault: another format, an unfinished save, a missing or truncated
            file, chunks that leave holes or overlap, compressed data, a dangerous pickle.
    """
    tensors, objects, optimizer = _read_metadata(read, sizes, where, _OPTIMIZER.match)
    common = _common(read, sizes, objects, where)
    objects.pop(COMMON_OBJECT, None)
    return CheckpointIndex(tensors, objects, optimizer, common)


def read_places(read: Read, sizes: Mapping[str, int], where: str) -> tuple[dict[str, ChunkedTensor], dict[str, Blob]]:
    """Read all tensors and objects of a checkpoint by key, including the optimizer's and the common state.

    Arguments and errors as for `read_index`. Reads only ``.metadata`` and ``metadata.json``.
    """
    tensors, objects, _ = _read_metadata(read, sizes, where, lambda key: False)
    return tensors, objects


def _read_metadata(
    read: Read, sizes: Mapping[str, int], where: str, left_out: Callable[[str], object]
) -> tuple[dict[str, ChunkedTensor], dict[str, Blob], tuple[str, ...]]:
    """Tensors, objects, and the keys that are ``left_out``."""
    _check_format(read, sizes, where)
    try:
        if sizes[METADATA] > _LARGEST_METADATA:
            raise BadPickle(f"has {sizes[METADATA]} bytes, more than any checkpoint's")
        builder = _Builder(unpickle(read(METADATA, 0, None), _METADATA_NAMES), sizes, left_out)
        return builder.tensors(), builder.objects(), builder.left_out()
    except ValueError as e:
        raise UserError(f"{where}/{METADATA} {e}; save or copy the checkpoint again.") from None


def _check_format(read: Read, sizes: Mapping[str, int], where: str) -> None:
    """Reject folders of other formats, naming the format."""
    again = "save the checkpoint again with --ckpt-format torch_dist"
    if METADATA_JSON in sizes:
        try:
            found = json.loads(read(METADATA_JSON, 0, None))
            backend, version = found["sharded_backend"], found["sharded_backend_version"]
            if not isinstance(backend, str) or type(version) is not int:
                raise TypeError
        except (ValueError, TypeError, KeyError, RecursionError):
            raise UserError(f"{where}/{METADATA_JSON} names no sharded_backend; copy the checkpoint again.") from None
        if (backend, version) != ("torch_dist", 1):
            raise UserError(
                f"{where}/{METADATA_JSON}: the format is {str(backend)[:40]!r} version {str(version)[:40]}, "
                f"only 'torch_dist' version 1 can be read; {again}."
            )
    if METADATA not in sizes:
        for pattern, what in (
            (r"(.*/)?\.z(array|group)", "zarr arrays"),
            (r"(.*/)?(model_optim_rng|distrib_optim)\.pt", "one file per rank (--ckpt-format torch)"),
            (r".*\.safetensors", "safetensors, which a Hugging Face model folder has"),
        ):
            if any(re.fullmatch(pattern, name) for name in sizes):
                raise UserError(f"{where} holds {what}, not torch_dist; {again}.")
        raise UserError(f"{where}: {METADATA} is missing, so no save was finished here; give another folder.")
    if METADATA_JSON not in sizes:
        raise UserError(
            f"{where}: {METADATA_JSON} is missing: written by torch's own checkpointing (torch_dcp, fsdp_dtensor), "
            f"whose names differ; {again}."
        )


def _common(read: Read, sizes: Mapping[str, int], objects: Mapping[str, Blob], where: str) -> dict[str, Any]:
    """The common state: a file up to Megatron-Core 0.18, an object in 0.19."""
    if COMMON in sizes:
        blob = Blob(COMMON, 0, sizes[COMMON])
    elif COMMON_OBJECT in objects:
        blob = objects[COMMON_OBJECT]
    else:
        raise UserError(f"{where}: {COMMON} is missing and {METADATA} lists no common_state; copy the folder again.")
    try:
        head = read(blob.file, blob.offset, min(blob.length, _LARGEST_COMMON))
        found = next(
            (head[start:end] for name, start, end in archive.records(head) if name == "data.pkl" and end), None
        )
        if found is None:
            raise BadPickle("has no whole data.pkl")
        common = unpickle(found, _COMMON_NAMES)
        if isinstance(common, list) and len(common) == 1:
            common = common[0]
        if not isinstance(common, dict):
            raise BadPickle("holds no dict")
    except ValueError as e:
        raise UserError(f"{where}/{blob.file}: the common state {e}; save or copy the checkpoint again.") from None
    return common


class _Builder:
    """Builds an index from an unpickled ``Metadata``. Every method raises ValueError for invalid input."""

    def __init__(self, metadata: Any, sizes: Mapping[str, int], left_out: Callable[[str], object]) -> None:
        """``left_out``: predicate for keys that are only listed and not validated."""
        state = _state(metadata, "Metadata")
        self._entries = state.get("state_dict_metadata")
        storage = state.get("storage_data")
        if not isinstance(self._entries, dict) or not isinstance(storage, dict):
            raise BadPickle("lists no places in data files")
        if not all(type(key) is str and key.isprintable() for key in self._entries):
            raise BadPickle("has keys that are not text, or cannot be shown")
        self._left_out = left_out
        self._places = dict(_places(storage, sizes, left_out))

    def left_out(self) -> tuple[str, ...]:
        return tuple(key for key in self._entries if self._left_out(key))

    def objects(self) -> dict[str, Blob]:
        return {key: self._place(key, None) for key, _ in self._of("BytesStorageMetadata")}

    def tensors(self) -> dict[str, ChunkedTensor]:
        return {key: self._tensor(key, entry) for key, entry in self._of("TensorStorageMetadata")}

    def _of(self, kind: str) -> Iterator[tuple[str, Opaque]]:
        kinds = {f"{_MODULE}.{name}" for name in ("BytesStorageMetadata", "TensorStorageMetadata")}
        for key, entry in self._entries.items():
            if not isinstance(entry, Opaque) or entry.name not in kinds:
                raise BadPickle(f"says of {key!r} neither that it is a tensor nor an object")
            if entry.name == f"{_MODULE}.{kind}" and not self._left_out(key):
                yield key, entry

    def _place(self, key: str, offsets: tuple[int, ...] | None) -> Blob:
        try:
            return self._places[key, offsets]
        except KeyError:
            chunk = "" if offsets is None else f"its chunk at {list(offsets)}, "
            raise BadPickle(f"has no place in a file for {chunk}{key}") from None

    def _tensor(self, key: str, entry: Opaque) -> ChunkedTensor:
        state = _state(entry, "TensorStorageMetadata")
        properties = _state(state.get("properties"), "TensorProperties", tuple)
        name = properties[0] if properties and isinstance(properties[0], str) else ""
        if name not in BY_TORCH_NAME:
            raise BadPickle(f"says that {key} has type {name[:40]}, which is not one of {', '.join(DTYPES)}")
        dtype = BY_TORCH_NAME[name]
        shape, boxes = _dims(state.get("size")), state.get("chunks")
        if not isinstance(boxes, list):
            raise BadPickle(f"lists no chunks of {key}")
        chunks = []
        for box in boxes:
            corner = _state(box, "ChunkStorageMetadata")
            offsets, extent = _dims(corner.get("offsets")), _dims(corner.get("sizes"))
            place = self._place(key, offsets)
            if place.length < prod(extent) * dtype.nbytes:
                raise BadPickle(
                    f"gives {place.length} bytes to the chunk of {key} at {list(offsets)}, "
                    f"too few for {list(extent)} in {dtype.name}"
                )
            chunks.append(Chunk(offsets, extent, *place))
        if fault := tiling_fault(shape, chunks):
            raise BadPickle(f"describes {key} wrongly: {fault}")
        return ChunkedTensor(dtype.name, shape, tuple(chunks))


_MODULE = "torch.distributed.checkpoint.metadata"


def _state(made: Any, name: str, kind: type = dict) -> Any:
    """Fields of one of torch's metadata objects."""
    if not isinstance(made, Opaque) or made.name != f"{_MODULE}.{name}" or not isinstance(made.state, kind):
        raise BadPickle(f"lacks a {name} of torch.distributed.checkpoint")
    return made.state


def _dims(values: Any) -> tuple[int, ...]:
    if type(values) is not tuple:
        raise BadPickle("gives an invalid size")
    for value in values:
        if type(value) is not int or not 0 <= value < _LARGEST_SIZE:
            raise BadPickle("gives an invalid size")
    return values


def _places(
    storage: dict[Any, Any], sizes: Mapping[str, int], left_out: Callable[[str], object]
) -> Iterator[tuple[tuple[str, tuple[int, ...] | None], Blob]]:
    """(key, offsets) → location, of everything that is not ``left_out``, each inside its file."""
    for index, info in storage.items():
        at = _state(index, "MetadataIndex")
        key, offsets = at.get("fqn"), at.get("offset")
        if type(key) is not str:
            raise BadPickle("has keys that are not text")
        if left_out(key):
            continue
        place = info.state if isinstance(info, Opaque) and isinstance(info.state, dict) else {}
        file, offset, length = place.get("relative_path"), place.get("offset"), place.get("length")
        if type(file) is not str or type(offset) is not int or type(length) is not int:
            raise BadPickle(f"gives no place in a file for {key}")
        if not (0 <= offset < _LARGEST_SIZE and 0 < length < _LARGEST_SIZE):
            raise BadPickle(f"gives no place in a file for {key}")
        if place.get("transform_descriptors"):
            raise BadPickle(f"says that {key} is compressed or encrypted, which is not supported")
        if file not in sizes:
            raise BadPickle(f"needs {key} from {file[:200]}, which is missing")
        if offset + length > sizes[file]:
            raise BadPickle(f"needs {key} from bytes {offset} to {offset + length} of {file}, which has {sizes[file]}")
        yield (key, None if offsets is None else _dims(offsets)), Blob(file, offset, length)

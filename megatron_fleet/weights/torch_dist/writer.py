"""Small files of a checkpoint: ``.metadata``, ``common.pt``, ``metadata.json``, and the extra-state object."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from typing import Any

from megatron_fleet.weights.torch_dist import archive, container
from megatron_fleet.weights.torch_dist import pickle_writer as emit
from megatron_fleet.weights.torch_dist.dtypes import DTYPES
from megatron_fleet.weights.torch_dist.index import Blob, ChunkedTensor

_METADATA = "torch.distributed.checkpoint.metadata"
_FILESYSTEM = "torch.distributed.checkpoint.filesystem"


def metadata_bytes(
    tensors: Mapping[str, ChunkedTensor], aliases: Mapping[str, str], objects: Mapping[str, Blob]
) -> bytes:
    """``.metadata``: the pickle of ``torch.distributed.checkpoint.metadata.Metadata``, built from its names alone.

    Args:
        aliases: additional key → the key of ``tensors`` whose stored bytes it shares.
        objects: key (``…_extra_state/shard_0_1``) → its location; several may share one.

    Raises:
        ValueError: a duplicate key. KeyError: an alias of an unknown tensor, or a dtype not in ``dtypes.DTYPES``.
    """
    if twice := (aliases.keys() & tensors.keys()) | (objects.keys() & (aliases.keys() | tensors.keys())):
        raise ValueError(f"given twice: {sorted(twice)[:3]}")
    tensors = {**tensors, **{alias: tensors[key] for alias, key in aliases.items()}}
    return _Metadata(tensors, objects).pickled()


class _Metadata:
    """Writes strings, classes and types once and refers to them by memo index."""

    def __init__(self, tensors: Mapping[str, ChunkedTensor], objects: Mapping[str, Blob]) -> None:
        self._tensors = tensors
        self._objects = objects
        self._out = bytearray(emit.PROTO)
        self._defined = 0
        files = [blob.file for blob in objects.values()]
        files += [chunk.file for tensor in tensors.values() for chunk in tensor.chunks]
        texts = dict.fromkeys((*tensors, *objects, *files))
        self._texts = {text: self._define(emit.text(text)) for text in texts}
        self._dtypes = {d: self._define(_properties(d)) for d in dict.fromkeys(t.dtype for t in tensors.values())}
        self._size = self._define(emit.named("torch", "Size"))
        self._tensor = self._record(_METADATA, "TensorStorageMetadata", "properties", "size", "chunks")
        self._chunk = self._record(_METADATA, "ChunkStorageMetadata", "offsets", "sizes")
        self._bytes = self._define(emit.named(_METADATA, "BytesStorageMetadata"))
        self._index = self._record(_METADATA, "MetadataIndex", "fqn", "index", "offset")
        self._place = self._record(_FILESYSTEM, "_StorageInfo", "relative_path", "offset", "length")

    def pickled(self) -> bytes:
        out = self._out
        out += _new(emit.named(_METADATA, "Metadata")) + emit.EMPTY_DICT + emit.MARK
        out += emit.text("state_dict_metadata") + emit.EMPTY_DICT + emit.MARK
        for key, tensor in self._tensors.items():
            out += self._texts[key] + self._tensor_entry(tensor)
        for key in self._objects:
            out += self._texts[key] + _new(self._bytes)
        out += emit.SETITEMS + emit.text("planner_data") + emit.NONE
        out += emit.text("storage_data") + emit.EMPTY_DICT + emit.MARK
        for key, tensor in self._tensors.items():
            for chunk in tensor.chunks:
                out += self._entry(key, self._dims(chunk.offsets), chunk.file, chunk.offset, chunk.length)
        for key, blob in self._objects.items():
            out += self._entry(key, emit.NONE, *blob)
        out += emit.SETITEMS + emit.text("storage_meta") + emit.NONE
        out += emit.text("version") + emit.text("1.0.0") + emit.SETITEMS + emit.BUILD + emit.STOP
        return bytes(out)

    def _define(self, content: bytes) -> bytes:
        """Write ``content`` for later use; return the bytes that push it."""
        self._out += content + emit.put(self._defined) + emit.POP
        self._defined += 1
        return emit.get(self._defined - 1)

    def _record(self, module: str, name: str, *fields: str) -> tuple[bytes, ...]:
        """Define a dataclass; return the bytes that precede each of its values."""
        start = _new(self._define(emit.named(module, name))) + emit.EMPTY_DICT + emit.MARK
        first, *others = (self._define(emit.text(field)) for field in fields)
        return (start + first, *others)

    def _dims(self, values: tuple[int, ...]) -> bytes:
        return self._size + emit.integers(values) + emit.TUPLE_1 + emit.REDUCE

    def _tensor_entry(self, tensor: ChunkedTensor) -> bytes:
        properties, size, chunks = self._tensor
        offsets, sizes = self._chunk
        parts = [properties, self._dtypes[tensor.dtype], size, self._dims(tensor.shape), chunks]
        parts += [emit.EMPTY_LIST, emit.MARK]
        for chunk in tensor.chunks:
            parts += [offsets, self._dims(chunk.offsets), sizes, self._dims(chunk.sizes), emit.SETITEMS, emit.BUILD]
        parts += [emit.APPENDS, emit.SETITEMS, emit.BUILD]
        return b"".join(parts)

    def _entry(self, key: str, offsets: bytes, file: str, start: int, length: int) -> bytes:
        """One item of ``storage_data``: (key, chunk offsets) → its location."""
        fqn, index, offset = self._index
        path, position, size = self._place
        return b"".join(
            (
                *(fqn, self._texts[key], index, emit.NONE, offset, offsets, emit.SETITEMS, emit.BUILD),
                *(path, self._texts[file], position, emit.integer(start), size, emit.integer(length)),
                *(emit.SETITEMS, emit.BUILD),
            )
        )


def extra_state_blob() -> bytes:
    """Object stored under every ``_extra_state`` key: Transformer Engine layers save it if they have no state."""
    return container.wrap_empty_in_list()


def common_bytes(iteration: int = 0, content_metadata: Mapping[str, Any] | None = None, **more: Any) -> bytes:
    """``common.pt``: the non-tensor state, in the form that Megatron-Core 0.16 to 0.20 read.

    Args:
        content_metadata: plain values with which Megatron's modules described themselves.
        more: further entries, plain values too.
    """
    common = {
        "checkpoint_version": 3.0,
        "iteration": iteration,
        "content_metadata": {"singleton_local_shards": False} if content_metadata is None else dict(content_metadata),
        **more,
    }
    return b"".join(archive.pack(pickle.dumps(common, protocol=2), None))


def metadata_json_bytes() -> bytes:
    """``metadata.json``: format identifier. Megatron does not recognise a checkpoint without it."""
    backends = {"sharded_backend": "torch_dist", "common_backend": "torch"}
    return json.dumps(backends | {f"{name}_version": 1 for name in backends}).encode()


def _new(name: bytes) -> bytes:
    return name + emit.EMPTY_TUPLE + emit.NEWOBJ


def _properties(dtype: str) -> bytes:
    """``TensorProperties``: dtype, layout, requires_grad, memory format, pin_memory."""
    return b"".join(
        (
            _new(emit.named(_METADATA, "TensorProperties")) + emit.MARK,
            emit.named("torch", DTYPES[dtype].torch),
            emit.named("torch.serialization", "_get_layout") + emit.text("torch.strided") + emit.TUPLE_1 + emit.REDUCE,
            emit.FALSE,
            emit.named(_METADATA, "_MEM_FORMAT_ENCODING") + emit.integers((0,)) + emit.REDUCE,
            emit.FALSE + emit.TUPLE + emit.BUILD,
        )
    )

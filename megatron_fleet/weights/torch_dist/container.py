"""Tensors in ``torch.save`` files: locating their bytes, and wrapping given bytes in such a file."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

from megatron_fleet.config.errors import UserError
from megatron_fleet.weights.torch_dist import archive
from megatron_fleet.weights.torch_dist import pickle_writer as emit
from megatron_fleet.weights.torch_dist.dtypes import BY_STORAGE, BY_TORCH_NAME, DTYPES, Dtype
from megatron_fleet.weights.torch_dist.index import Chunk
from megatron_fleet.weights.torch_dist.pickle_reader import Opaque, unpickle

HEAD_BYTES = 4096
"""Leading bytes of a container that ``data_span`` needs; torch 1.6 to 2.13 place the data within the first 1 KiB."""

_CACHED = 4096
_NAMES = ("torch", "collections")


@dataclass(frozen=True, slots=True)
class Container:
    """``prefix``, ``nbytes`` raw little-endian row-major bytes, ``suffix``: together a file that ``torch.load`` reads.

    The raw bytes are aligned to 64.
    """

    prefix: bytes
    suffix: bytes
    nbytes: int

    @property
    def length(self) -> int:
        """Size of the whole file in bytes."""
        return len(self.prefix) + self.nbytes + len(self.suffix)


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Bytes of a contiguous tensor inside a container: ``offset`` is relative to the container's start.

    ``dtype`` is a safetensors name (``BF16``).
    """

    offset: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]


@lru_cache(_CACHED)
def wrap(dtype: str, shape: tuple[int, ...]) -> Container:
    """Build the container for a tensor.

    Args:
        dtype: safetensors name (``BF16``), one of ``dtypes.DTYPES``.
    """
    nbytes = prod(shape) * DTYPES[dtype].nbytes
    prefix, suffix = archive.pack(emit.PROTO + _tensor(DTYPES[dtype], shape) + emit.STOP, nbytes)
    return Container(prefix, suffix, nbytes)


def wrap_empty_in_list() -> bytes:
    """``torch.save([torch.empty(0, dtype=torch.uint8)])``."""
    content = emit.EMPTY_LIST + emit.MARK + _tensor(DTYPES["U8"], (0,)) + emit.APPENDS
    return b"".join(archive.pack(emit.PROTO + content + emit.STOP, 0))


def data_span(head: bytes, length: int, where: str) -> ByteRange:
    """Locate the tensor's bytes in a container written by torch 1.6 or later.

    Args:
        head: the first ``HEAD_BYTES``, or the whole container if it is shorter.
        length: size of the whole container in bytes.
        where: file and tensor, for messages.

    Raises:
        UserError: not a single contiguous tensor of a dtype that safetensors has.
    """
    try:
        return _data_span(head, length)
    except ValueError as e:
        raise UserError(f"{where} {e}; save the checkpoint again with Megatron's torch_dist format.") from None


def data_start(head: bytes, chunk: Chunk, dtype: str, where: str) -> int:
    """Offset in its file of the data of a chunk that ``.metadata`` describes.

    Args:
        head: as for `data_span`.
        dtype: of the tensor, as ``.metadata`` has it.
        where: the file, for messages.

    Raises:
        UserError: the file holds something else there.
    """
    span = data_span(head, chunk.length, where)
    if span.dtype != dtype or _long_axes(span.shape) != _long_axes(chunk.sizes):
        raise UserError(
            f"{where} holds {span.dtype} {list(span.shape)} at byte {chunk.offset}, where .metadata promises {dtype} "
            f"{list(chunk.sizes)}; save or copy the checkpoint again."
        )
    return chunk.offset + span.offset


def _long_axes(shape: tuple[int, ...]) -> list[int]:
    """A shape without axes of length 1, which writers prepend for layers and experts."""
    return [n for n in shape if n != 1]


def _data_span(head: bytes, length: int) -> ByteRange:
    stored: _Stored | None = None
    for name, start, end in archive.records(head):
        if name == "data.pkl" and end is not None:
            stored = _stored(head[start:end])
        elif name == "byteorder" and head[start:end] != b"little":
            raise ValueError("holds big-endian numbers")
        elif stored is not None and name == f"data/{stored.record}":
            if start + stored.storage_bytes > length:
                raise ValueError(f"is cut off: {stored.storage_bytes} bytes of data do not fit in {length}")
            return ByteRange(start + stored.skip, stored.nbytes, stored.dtype, stored.shape)
    raise ValueError("does not reach its data within the bytes read" if len(head) < length else "holds no tensor data")


@dataclass(frozen=True, slots=True)
class _Stored:
    """Tensor location according to ``data.pkl``: ``nbytes`` at ``skip`` in a record of ``storage_bytes``."""

    record: str
    storage_bytes: int
    skip: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]


@lru_cache(_CACHED)
def _stored(pickled: bytes) -> _Stored:
    made = unpickle(pickled, _NAMES)
    rebuilt = made.name if isinstance(made, Opaque) else type(made).__name__
    known = {"torch._utils._rebuild_tensor_v2": (6, 7), "torch._utils._rebuild_tensor_v3": (7, 8)}
    if rebuilt not in known or not isinstance(made.args, tuple) or len(made.args) not in known[rebuilt]:
        raise ValueError(f"holds {rebuilt[:100]}, no plain tensor")
    storage, first, shape, stride, _, _, *rest = made.args
    typed = _storage_dtype(storage)
    if rebuilt.endswith("v3"):
        name = _name(rest.pop(0))
        if typed is not None or name not in BY_TORCH_NAME:
            raise ValueError(f"holds a tensor of type {name[:100]}, which is not supported")
        dtype = BY_TORCH_NAME[name]
    elif typed is None:
        raise ValueError("holds a tensor without a type")
    else:
        dtype = typed
    if rest and rest != [None] and rest != [{}]:
        raise ValueError("holds a tensor with lazy conjugation or negation")
    _, _, record, _, count = storage.args
    if not (isinstance(record, str) and _counts((count, first)) and _counts(shape) and _counts(stride)):
        raise ValueError("describes its tensor in a way that torch does not")
    if not _contiguous(shape, stride):
        raise ValueError(f"holds a tensor of shape {list(shape)} with strides {list(stride)}, which is not contiguous")
    storage_bytes = count * (1 if typed is None else dtype.nbytes)
    skip = first * dtype.nbytes
    nbytes = prod(shape) * dtype.nbytes
    if nbytes and skip + nbytes > storage_bytes:
        raise ValueError(f"holds a tensor of {nbytes} bytes in a storage of {storage_bytes}")
    return _Stored(record, storage_bytes, skip if nbytes else 0, nbytes, dtype.name, shape)


def _storage_dtype(storage: Any) -> Dtype | None:
    """Dtype of a typed storage's elements; ``None`` for an untyped storage."""
    if (
        not isinstance(storage, Opaque)
        or storage.name != "persistent"
        or not isinstance(storage.args, tuple)
        or len(storage.args) != 5
        or storage.args[0] != "storage"
    ):
        raise ValueError("holds a tensor without a storage")
    name = _name(storage.args[1])
    if name == "torch.storage.UntypedStorage":
        return None
    if name not in BY_STORAGE:
        raise ValueError(f"holds {name[:100]}, whose element type is not supported")
    return BY_STORAGE[name]


def _name(value: Any) -> str:
    """Name of a class; a malicious pickle may have a value of any depth in its place."""
    return value if isinstance(value, str) else f"a {type(value).__name__}"


def _counts(values: Any) -> bool:
    return isinstance(values, tuple) and all(type(value) is int and 0 <= value < 1 << 63 for value in values)


def _contiguous(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether the layout is row-major; strides of axes of length 1 and of empty tensors are irrelevant."""
    if len(shape) != len(stride):
        return False
    step = 1
    for size, found in zip(reversed(shape), reversed(stride), strict=True):
        if size != 1 and found != step:
            return 0 in shape
        step *= size
    return True


def _tensor(dtype: Dtype, shape: tuple[int, ...]) -> bytes:
    """Pickle of a contiguous CPU tensor in storage ``0``, as ``torch.save`` writes it."""
    strides = tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))
    count = prod(shape)
    if dtype.storage is None:
        storage, elements = emit.named("torch.storage", "UntypedStorage"), count * dtype.nbytes
    else:
        storage, elements = emit.named("torch", dtype.storage), count
    return b"".join(
        (
            emit.named("torch._utils", "_rebuild_tensor_v2" if dtype.storage else "_rebuild_tensor_v3"),
            emit.MARK,
            emit.MARK + emit.text("storage") + storage + emit.text("0") + emit.text("cpu") + emit.integer(elements),
            emit.TUPLE + emit.PERSISTENT_ID,
            emit.integer(0) + emit.integers(shape) + emit.integers(strides) + emit.FALSE,
            emit.named("collections", "OrderedDict") + emit.EMPTY_TUPLE + emit.REDUCE,
            b"" if dtype.storage else emit.named("torch", dtype.torch),
            emit.TUPLE + emit.REDUCE,
        )
    )

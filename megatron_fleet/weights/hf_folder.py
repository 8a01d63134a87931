"""Metadata of an HF model folder on local disk or S3: config, tensor names, dtypes, shapes. Reads no tensor data."""

from __future__ import annotations

import json
import logging
import math
import re
import struct
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_fleet.config.errors import UserError
from megatron_fleet.config.files import MAX_DEPTH, depth_exceeds
from megatron_fleet.storage.folder import Readable
from megatron_fleet.storage.open import open_folder

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
JOURNAL = "conversion.json"
"""File of a conversion's output that identifies the conversion: written first, so that only the same one is resumed."""
ORIGIN = "export.json"
"""File of an export in a store that names its checkpoint; it comes first, so that no two exports are mixed."""
NOTES = (JOURNAL, ORIGIN)
"""Files that tell where a folder is from, and do not belong to a model that is made from it."""
_BY_SIZE = {1: "BOOL U8 I8 F8_E4M3 F8_E5M2 F8_E8M0", 2: "I16 U16 F16 BF16", 4: "I32 U32 F32", 8: "I64 U64 F64"}
ITEM_BYTES = {name: size for size, names in _BY_SIZE.items() for name in names.split()}
"""Item size of each safetensors dtype that takes whole bytes."""
USUAL_HEADER = 64 << 10
"""Bytes that most headers do not exceed: one read is enough for them."""
HEADERS_AT_ONCE = 16
_MAX_HEADER = 100_000_000
"""The safetensors limit, in bytes."""
_MAX_AXES = 64
"""PyTorch's limit."""
_SHARD = re.compile(r"(?!consolidated)[^/]+-\d+-of-\d+\.safetensors")
"""One of several files of a model; ``consolidated`` ones hold its publisher's own names besides."""
_SUFFIXES = (".json", ".txt", ".jinja", ".model", ".tiktoken", ".py")
"""Of the files beside the weights."""
_POINTER, _POINTER_BYTES = b"version https://git-lfs", 1024
"""Beginning and largest size of the small file that git leaves where it has not fetched a large one."""
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor as a safetensors header declares it.

    Attributes:
        file: file name inside the folder.
        dtype: safetensors name (``BF16``).
        offset: byte offset of its data in the file.
    """

    file: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


def as_folder(place: Readable | Path | str) -> Readable:
    """Open a folder given in any form."""
    return open_folder(place) if isinstance(place, Path | str) else place


def read_config(hf_dir: Readable | Path | str) -> dict[str, Any]:
    """The raw ``config.json`` of a folder. Raises UserError if it is missing or not a JSON object."""
    folder = as_folder(hf_dir)
    config = _read_json(folder, "config.json")
    if not isinstance(config, dict):
        raise UserError(f"{folder.url}/config.json: expected a JSON object.")
    return config


def read_headers(hf_dir: Readable | Path | str) -> dict[str, StoredTensor]:
    """Read every tensor's metadata in a folder (one file, or several with an index) from the file headers.

    Raises:
        UserError: a file is missing, truncated, a pointer of Git LFS or not a safetensors file; files and index are not
            of one model; a tensor listed in the index is missing, or a tensor appears twice.
    """
    folder = as_folder(hf_dir)
    sizes = folder.sizes()
    _refuse_pointers(folder, sizes)
    shards = [name for name in sizes if _SHARD.fullmatch(name)]
    if INDEX not in sizes:
        return _read_single(folder, sizes, shards)
    weight_map = read_weight_map(folder)
    listed = sorted(set(weight_map.values()))
    if SINGLE in sizes and SINGLE not in listed:
        log.warning("%s has %s and %s; the files that the index lists are taken", folder.url, SINGLE, INDEX)
    stored: dict[str, StoredTensor] = {}
    if absent := [name for name in listed if name not in sizes]:
        raise UserError(f"{folder.url}/{absent[0]}: missing although {INDEX} lists it; download it again.")
    with ThreadPoolExecutor(HEADERS_AT_ONCE) as pool:  # of a remote model, each is a request
        headers = list(pool.map(lambda name: read_header(folder, name, sizes[name]), listed))
    for name, header in zip(listed, headers, strict=True):
        for tensor, entry in header.items():
            if tensor in stored:
                raise UserError(
                    f"{folder.url}/{name}: tensor {tensor} is in {stored[tensor].file} too; remove one of the files."
                )
            stored[tensor] = entry
    for tensor, name in weight_map.items():
        if tensor not in stored or stored[tensor].file != name:
            raise UserError(
                f"{folder.url}/{name}: tensor {tensor} is missing although {INDEX} lists it; download both again."
            )
    if extra := sorted(set(shards) - set(listed)):
        raise UserError(
            f"{folder.url}/{extra[0]}: {INDEX} does not list it; remove it if it is of another version of the model, "
            f"or download the index again."
        )
    if unlisted := stored.keys() - weight_map.keys():
        log.warning("%s: %s does not list %s, which is read anyway", folder.url, INDEX, min(unlisted))
    return stored


def _refuse_pointers(folder: Readable, sizes: Mapping[str, int]) -> None:
    for name, size in sizes.items():
        small = size <= _POINTER_BYTES and "/" not in name and name.endswith((*_SUFFIXES, ".safetensors"))
        if small and folder.read(name).startswith(_POINTER):
            raise UserError(
                f"{folder.url}/{name} is a Git LFS pointer, not the file itself; run `git lfs pull` in the "
                f"folder, or download the model with `mfleet model fetch`."
            )


def _read_single(folder: Readable, sizes: Mapping[str, int], shards: list[str]) -> dict[str, StoredTensor]:
    """Headers of a folder without an index."""
    if SINGLE in sizes and not shards:
        return read_header(folder, SINGLE, sizes[SINGLE])
    if shards:
        beside = f" and is next to {SINGLE}" if SINGLE in sizes else ""
        raise UserError(
            f"{folder.url}/{shards[0]} is one of several files{beside}, and {INDEX}, which lists them, is missing; "
            f"download it too."
        )
    other = next((name for name in sizes if name.endswith((".gguf", ".bin", ".pt", ".pth"))), None)
    found = "give a folder with safetensors" if other is None else f"{other} cannot be read, save it as safetensors"
    raise UserError(f"{folder.url}: neither {SINGLE} nor {INDEX} is there; {found}.")


def read_weight_map(folder: Readable) -> dict[str, str]:
    """Read the file of each tensor from the index. Raises UserError if it is malformed."""
    index = _read_json(folder, INDEX)
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"{folder.url}/{INDEX}: weight_map is missing; download the file again.")
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or "/" in name or not name.endswith(".safetensors"):
            raise UserError(
                f"{folder.url}/{INDEX}: {tensor} lies in {name!r}, which is not a safetensors file of this folder; "
                f"download the file again."
            )
    return weight_map


def read_header(folder: Readable, name: str, size: int) -> dict[str, StoredTensor]:
    """Read the tensor metadata of one safetensors file of ``size`` bytes, in data order.

    Format: https://huggingface.co/docs/safetensors (header length as u64, header as JSON, data).

    Raises:
        UserError: the file is truncated or malformed.
    """
    header = read_header_bytes(folder, name, size)
    with _format_errors_as_user_error(folder, name):
        return _check_header(name, _parse_header(header), len(header), size)


def read_header_bytes(folder: Readable, name: str, size: int) -> bytes:
    """Read the header's length and JSON, i.e. the bytes before the data. Raises UserError if it is not safetensors."""
    with _format_errors_as_user_error(folder, name):
        if size < 8:
            raise ValueError(f"it has only {size} bytes")
        head = folder.read(name, 0, min(size, USUAL_HEADER))
        (length,) = struct.unpack_from("<Q", head)
        if length > min(size - 8, _MAX_HEADER):
            raise ValueError(f"its header claims {length} bytes, but the file has {size}")
        rest = 8 + length - len(head)
        return head + folder.read(name, len(head), rest) if rest > 0 else head[: 8 + length]


def parse_header(name: str, header: bytes) -> dict[str, StoredTensor]:
    """Parse the tensors of a file from its `read_header_bytes`. Raises ValueError if it is malformed."""
    if header[:8] != (len(header) - 8).to_bytes(8, "little", signed=True):
        raise ValueError(f"the header of {name} has {len(header) - 8} bytes but claims another number")
    return _check_header(name, _parse_header(header), len(header), None)


def safetensors_header(entries: Mapping[str, Any]) -> bytes:
    """Length and JSON of a safetensors header, padded to a multiple of 8 like the reference writer's."""
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _parse_header(header: bytes) -> dict[str, Any]:
    parsed = _parse_plain(header[8:])
    if parsed is None:
        parsed = parse_json(header[8:])
    if not isinstance(parsed, dict):
        raise ValueError("its header is not a JSON object")
    parsed.pop("__metadata__", None)
    return parsed


def _parse_plain(text: bytes) -> dict[str, Any] | None:
    """Parse a header as every writer makes it, three times as fast as `parse_json`, which all others need (``None``).

    That nothing is there twice, and nothing deeply nested, is seen from the numbers of keys and brackets.
    """
    try:
        parsed = json.loads(text.decode("utf-8"))
    except (ValueError, RecursionError):
        return None
    if not isinstance(parsed, dict) or b"\\" in text:
        return None
    has_metadata = "__metadata__" in parsed
    tensors = len(parsed) - has_metadata
    counts = {b'"dtype"': tensors, b'"shape"': tensors, b'"data_offsets"': tensors, b"[": 2 * tensors}
    counts[b"{"] = 1 + len(parsed)
    return parsed if all(text.count(key) == count for key, count in counts.items()) else None


@contextmanager
def _format_errors_as_user_error(folder: Readable, name: str) -> Iterator[None]:
    """Convert any error of a malformed header to UserError."""
    try:
        yield
    except ValueError as e:
        # The message may quote the content of a broken file.
        why = " ".join(str(e).split())
        raise UserError(f"{folder.url}/{name}: not a whole safetensors file ({why}); download it again.") from None


def _check_header(file: str, header: dict[str, Any], start: int, size: int | None) -> dict[str, StoredTensor]:
    """Parse a header. Raises ValueError unless the tensors fill the data exactly."""
    spans = {name: _check_entry(name, entry) for name, entry in header.items()}
    end = start
    stored: dict[str, StoredTensor] = {}
    for name, (first, last) in sorted(spans.items(), key=lambda item: item[1]):
        tensor = StoredTensor(file, header[name]["dtype"], tuple(header[name]["shape"]), start + first)
        if tensor.offset != end:
            raise ValueError(f"tensor {name} begins at byte {tensor.offset} and what precedes it ends at {end}")
        if last - first != tensor.nbytes:
            raise ValueError(f"tensor {name} has {last - first} bytes and its shape asks for {tensor.nbytes}")
        end = start + last
        stored[name] = tensor
    if size is not None and end != size:
        raise ValueError(f"its header describes {end} bytes and the file has {size}")
    return stored


def _check_entry(name: str, entry: Any) -> tuple[int, int]:
    """Start and end of a tensor's data. Raises ValueError if its entry is malformed, or its name is not printable."""
    if not name.isprintable():
        raise ValueError(f"a tensor's name is {name[:100]!r}")
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise ValueError(f"tensor {name} lacks dtype, shape or data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise ValueError(f"tensor {name} has the unknown type {dtype!r}")
    for what, numbers, most in (("shape", shape, _MAX_AXES), ("data_offsets", offsets, 2)):
        if not isinstance(numbers, list) or len(numbers) > most or not all(map(_is_size, numbers)):
            raise ValueError(f"tensor {name} has {what} that are not a list of up to {most} sizes")
    if len(offsets) != 2:
        raise ValueError(f"tensor {name} has {len(offsets)} data_offsets and not 2")
    return offsets[0], offsets[1]


def _is_size(number: Any) -> bool:
    return type(number) is int and 0 <= number < 1 << 63


def parse_json(text: bytes) -> Any:
    """Parse JSON without duplicate keys. Raises ValueError, also for values that could not be written again."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        out = dict(pairs)
        if len(out) != len(pairs):
            ((name, _),) = Counter(name for name, _ in pairs).most_common(1)
            raise ValueError(f"{name} is there twice")
        return out

    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
        if depth_exceeds(value, MAX_DEPTH):
            raise RecursionError
        if b"\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError(f"it is nested more than {MAX_DEPTH} levels deep") from None
    except UnicodeEncodeError:
        raise ValueError("a text in it holds half of a surrogate pair") from None
    return value


def _read_json(folder: Readable, name: str) -> Any:
    try:
        return parse_json(folder.read(name))
    except ValueError as e:
        raise UserError(f"{folder.url}/{name}: not valid JSON ({e}); download it again.") from None


def companions(folder: Readable) -> Mapping[str, bytes]:
    """Non-weight files that belong to a model: tokenizer, generation config, chat template, code."""
    return {
        name: folder.read(name)
        for name in sorted(folder.sizes())
        if "/" not in name and name.endswith(_SUFFIXES) and not name.endswith(".safetensors.index.json")
        if name not in NOTES
    }

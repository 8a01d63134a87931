"""An HF model folder by its headers: config, tensor names, shapes. Standard library only; no tensor is read."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_fleet.config.errors import UserError
from megatron_fleet.weights.mapping import WeightTable

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DTYPES = ("F32", "BF16", "F16")
"""Stored types that load by a plain cast; anything else is a quantised form that needs a decoder of its own."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor as a safetensors header declares it. ``dtype`` in the format's own spelling (``BF16``)."""

    file: Path
    dtype: str
    shape: tuple[int, ...]


def read_config(hf_dir: Path | str) -> dict[str, Any]:
    """The raw ``config.json`` of a folder. Raises UserError when it is missing or no JSON object."""
    path = Path(hf_dir) / "config.json"
    config = _read_json(path)
    if not isinstance(config, dict):
        raise UserError(f"{path}: expected a JSON object.")
    return config


def read_headers(hf_dir: Path | str) -> dict[str, StoredTensor]:
    """Every tensor of a folder (one file, or several with an index), from the file headers.

    Raises:
        UserError: a file is missing, truncated or no safetensors file; or it lacks what the index promises.
    """
    folder = Path(hf_dir)
    index = folder / INDEX
    if not index.exists():
        if not (folder / SINGLE).exists():
            raise UserError(f"{folder}: neither {SINGLE} nor {INDEX} is there; give a folder with safetensors weights.")
        return read_header(folder / SINGLE)
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise UserError(f"{index}: weight_map is missing; download the file again.")
    stored: dict[str, StoredTensor] = {}
    for name in sorted(set(weight_map.values())):
        stored.update(read_header(folder / name))
    for tensor, name in weight_map.items():
        if tensor not in stored:
            raise UserError(f"{folder / name}: tensor {tensor} is missing although {INDEX} lists it.")
    return stored


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one safetensors file. Raises UserError when it is missing, truncated or malformed.

    Format: https://huggingface.co/docs/safetensors (length of the header as u64, the header as JSON, the data).
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as f:
            (length,) = struct.unpack("<Q", f.read(8))
            if length > size - 8:
                raise ValueError(f"its header claims {length} bytes and the file has {size}")
            header = json.loads(f.read(length))
        header.pop("__metadata__", None)
        end = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
        if end != size:
            raise ValueError(f"its header describes {end} bytes and the file has {size}")
        return {n: StoredTensor(path, e["dtype"], tuple(e["shape"])) for n, e in header.items()}
    except OSError as e:
        raise UserError(f"{path}: cannot be read ({e.strerror}).") from None
    except (ValueError, KeyError, TypeError, AttributeError, struct.error) as e:
        raise UserError(f"{path}: not a whole safetensors file ({e}); download it again.") from None


def check_hf_folder(hf_dir: Path | str, hf_config: Mapping[str, Any] | None = None) -> None:
    """Check that a folder holds exactly the tensors of its model, by headers alone.

    Raises:
        UserError: naming file, tensor, expected and actual shape (or type) of the first disagreement.
    """
    check_tensors(hf_dir, WeightTable(hf_config or read_config(hf_dir)), read_headers(hf_dir))


def check_tensors(hf_dir: Path | str, table: WeightTable, stored: Mapping[str, StoredTensor]) -> None:
    """``check_hf_folder`` on headers already read."""
    for tensor, shape in table.tensors.items():
        if tensor not in stored:
            raise UserError(f"{hf_dir}: tensor {tensor} is missing; config.json asks for it with shape {list(shape)}.")
        found = stored[tensor]
        if found.shape != shape:
            raise UserError(
                f"{found.file}: tensor {tensor} has shape {list(found.shape)}; config.json asks for {list(shape)}."
            )
        if found.dtype not in DTYPES:
            raise UserError(
                f"{found.file}: tensor {tensor} is stored as {found.dtype}; give a folder with {', '.join(DTYPES)}."
            )
    for tensor, found in stored.items():
        if tensor not in table.tensors and not table.is_inert(tensor):
            raise UserError(f"{found.file}: tensor {tensor} is no part of the model that config.json describes.")


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise UserError(f"{path}: cannot be read ({e.strerror}).") from None
    except ValueError as e:
        raise UserError(f"{path}: not valid JSON ({e}).") from None

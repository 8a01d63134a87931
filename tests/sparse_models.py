"""HF folders whose safetensors files have whole headers and no data: any size, in no time and no room."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from pathlib import Path

from megatron_fleet.weights.hf_folder import INDEX, ITEM_BYTES, SINGLE, safetensors_header
from megatron_fleet.weights.mapping import WeightTable

Stored = dict[str, tuple[str, tuple[int, ...]]]
"""Name of a stored tensor → its dtype and shape."""


def stored_as(
    config: Mapping[str, object],
    dtype: str = "BF16",
    fp8: Collection[str] = (),
    int4: Collection[str] = (),
    scales: str = "F32",
) -> Stored:
    """Tensors of the model of a config.json; those named in ``fp8`` and ``int4`` quantised."""
    out: Stored = {}
    for name, shape in WeightTable(config).tensors.items():
        base = name.removesuffix(".weight")
        if name in fp8:
            out[name] = ("F8_E4M3", shape)
            out[f"{base}.weight_scale_inv"] = (scales, tuple(-(-n // 128) for n in shape))
        elif name in int4:
            out[f"{base}.weight_packed"] = ("I32", (shape[0], shape[1] // 8))
            out[f"{base}.weight_scale"] = ("BF16", (shape[0], shape[1] // 32))
            out[f"{base}.weight_shape"] = ("I32", (2,))
        else:
            out[name] = (dtype, shape)
    return out


def write_file(path: Path, tensors: Stored) -> None:
    """Write a file that is all holes behind its header: its values are zeros."""
    entries, at = {}, 0
    for name, (dtype, shape) in tensors.items():
        end = at + math.prod(shape) * ITEM_BYTES[dtype]
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    header = safetensors_header(entries)
    path.write_bytes(header)
    with path.open("r+b") as file:
        file.truncate(len(header) + at)


def write_weights(folder: Path, tensors: Stored | None = None, files: int = 1) -> Path:
    """Write the files of a folder that has a config.json; more than one with an index.

    Args:
        tensors: ``None``: those of config.json, in BF16.
    """
    stored = stored_as(json.loads((folder / "config.json").read_text())) if tensors is None else tensors
    if files == 1:
        write_file(folder / SINGLE, stored)
        return folder
    names = list(stored)
    parts = {f"model-{k + 1:05d}-of-{files:05d}.safetensors": names[k::files] for k in range(files)}
    for file, part in parts.items():
        write_file(folder / file, {name: stored[name] for name in part})
    weight_map = {name: file for file, part in parts.items() for name in part}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder

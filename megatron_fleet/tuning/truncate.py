"""Truncation of a model to its first layers, as an HF folder."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from megatron_fleet.models.hf_config import architecture_of, drop_quantization, read_model
from megatron_fleet.storage.open import open_folder
from megatron_fleet.weights.hf_folder import INDEX, SINGLE, read_config
from megatron_fleet.weights.hf_model import open_model
from megatron_fleet.weights.hf_rows import HfReader
from megatron_fleet.weights.mapping import WeightTable
from megatron_fleet.weights.source import layer_groups

_TORCH = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def truncate(source: str, layers: int, out: Path) -> bool:
    """Write the embedding, the first ``layers`` layers and the head into ``out``, with quantised weights decoded to
    BF16.

    Holds one layer in memory at a time.

    Args:
        source: HF folder (local or S3), with or without weights.

    Returns:
        Whether the source has weights; otherwise ``out`` gets only a ``config.json``.

    Raises:
        UserError: files and ``config.json`` do not fit.
    """
    folder = open_folder(source)
    whole = read_config(folder)
    config = truncated_config(whole, layers)
    (out / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    if not {INDEX, SINGLE} & folder.sizes().keys():
        return False
    reader, table = HfReader(open_model(folder)), WeightTable(config)
    files: dict[str, str] = {}
    for number, names in enumerate(layer_groups(table.tensors)):
        tensors = {name: _read(reader, name, table.tensors[name]) for name in names}
        save_file(tensors, out / f"part-{number}.safetensors")
        files |= dict.fromkeys(names, f"part-{number}.safetensors")
    (out / INDEX).write_text(json.dumps({"weight_map": files}), encoding="utf-8")
    return True


def truncated_config(whole: dict[str, Any], layers: int) -> dict[str, Any]:
    """Return ``config.json`` of the first layers, without prediction layers and quantisation."""
    config = copy.deepcopy(whole)
    part = architecture_of(config).text
    text = config[part] if part else config
    text["num_hidden_layers"] = min(layers, read_model(whole).layers)
    if isinstance(text.get("layer_types"), list):
        text["layer_types"] = text["layer_types"][: text["num_hidden_layers"]]
    if "num_nextn_predict_layers" in text:
        text["num_nextn_predict_layers"] = 0
    drop_quantization(config)
    return config


def _read(reader: HfReader, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    values = torch.from_numpy(np.array(reader.read_rows(name, (0, shape[0]))))
    return values.view(_TORCH[reader.dtype(name)]) if values.dtype == torch.uint16 else values

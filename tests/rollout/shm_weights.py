"""Puts the tensors of an HF folder into a shared file, as the trainer does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from megatron_fleet.weights.vllm_shm import ALIGNMENT, checksum


def write_shared(file: Path, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns ``init_info`` and ``update_info``."""
    tensors = load_file(folder / "model.safetensors")
    offsets, end = [], 0
    for tensor in tensors.values():
        offsets.append(-(-end // ALIGNMENT) * ALIGNMENT)
        end = offsets[-1] + tensor.nbytes
    if not file.exists():
        file.write_bytes(bytes(end))
    buffer = np.memmap(file, np.uint8, "r+")
    for tensor, offset in zip(tensors.values(), offsets, strict=True):
        buffer[offset : offset + tensor.nbytes] = np.ascontiguousarray(tensor).reshape(-1).view(np.uint8)
    update = {
        "names": list(tensors),
        "dtype_names": [str(t.dtype) for t in tensors.values()],
        "shapes": [list(t.shape) for t in tensors.values()],
        "offsets": offsets,
        "checksums": [checksum(np.ascontiguousarray(t)) for t in tensors.values()],
    }
    return {"path": str(file), "nbytes": end}, update

"""A model folder with random weights: the shape of a real model without a download, for `experiment=gpu_smoke`."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from megatron_fleet.config.errors import UserError
from megatron_fleet.config.load import ROOT
from megatron_fleet.storage.local import begin_folder, commit_folder, os_errors_as_user_error, write_atomically
from megatron_fleet.weights.hf_folder import SINGLE
from megatron_fleet.weights.mapping import WeightTable

QWEN3_0_6B: Mapping[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "attention_bias": False,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
    "initializer_range": 0.02,
    "vocab_size": 151936,
    "dtype": "bfloat16",
}
"""The published ``config.json`` of Qwen3-0.6B, as far as it says what is computed."""
TINY = ROOT / "assets" / "tiny"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
"""Files of the embedded fleet's tokenizer. Its 1,024 tokens are the first of the vocabulary; others have no text."""


def write_random(target: Path, hf_config: Mapping[str, Any] = QWEN3_0_6B, seed: int = 0) -> int:
    """Create the folder ``target``: all or nothing.

    Matrices are Normal(0, ``initializer_range``), norms 1, in the dtype of ``hf_config``.

    Returns:
        The number of parameters.

    Raises:
        UserError: ``target`` exists or cannot be written.
    """
    with os_errors_as_user_error(target, "made"):
        if os.path.lexists(target):
            raise UserError(f"{target} already exists; name another folder or remove it.")
        partial = begin_folder(target)
        try:
            tensors = _random_tensors(hf_config, seed)
            save_file(tensors, partial / SINGLE, metadata={"format": "pt"})
            write_atomically(partial / "config.json", (json.dumps(dict(hf_config), indent=2) + "\n").encode())
            for name in TOKENIZER_FILES:
                shutil.copyfile(TINY / name, partial / name)
            commit_folder(partial, target)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    return sum(tensor.numel() for tensor in tensors.values())


def _random_tensors(hf_config: Mapping[str, Any], seed: int) -> dict[str, torch.Tensor]:
    generator, dtype = torch.Generator().manual_seed(seed), getattr(torch, hf_config["dtype"])
    std = hf_config["initializer_range"]
    return {
        name: torch.ones(shape, dtype=dtype)
        if len(shape) == 1
        else (torch.randn(shape, generator=generator) * std).to(dtype)
        for name, shape in WeightTable(hf_config).tensors.items()
    }

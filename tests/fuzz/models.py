"""HF folders of models with a few kilobytes of weights, as trees; without torch."""

from __future__ import annotations

import copy
import math
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tiny_configs import raw_config

from fuzz import folders
from megatron_fleet.convert.execute import Share, execute
from megatron_fleet.convert.to_megatron import plan_to_megatron
from megatron_fleet.weights.hf_folder import ITEM_BYTES
from megatron_fleet.weights.hf_model import open_model
from megatron_fleet.weights.mapping import WeightTable

FAMILIES = ("qwen3", "qwen3_moe", "deepseek_v3_fp8", "kimi_k25")
TINY = Path(__file__).parents[2] / "assets" / "tiny"
"""A model with a real tokenizer."""
_SMALL = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "moe_intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "vocab_size": 7,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4,
    "v_head_dim": 4,
    "n_routed_experts": 2,
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "n_group": 1,
}
_WIDE = dict.fromkeys(("hidden_size", "moe_intermediate_size"), 32)
"""Sizes that groups of 32 divide."""


def config(family: str) -> dict[str, Any]:
    """The ``config.json`` of a family's smallest model."""
    raw = raw_config(family, "v4")
    small = _SMALL | (_WIDE if family == "kimi_k25" else {})
    for part in (raw, raw.get("text_config", {})):
        part |= {key: value for key, value in small.items() if part.get(key) is not None}
        if "max_window_layers" in part:
            part["max_window_layers"] = 2
    return raw


@cache
def _tensors(family: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name → type and shape of what the files hold."""
    raw = config(family)
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, shape in WeightTable(raw).tensors.items():
        base = name.removesuffix(".weight")
        linear = len(shape) == 2 and not name.endswith(("embed_tokens.weight", "lm_head.weight", "gate.weight"))
        if family.endswith("fp8") and linear:
            found[name] = ("F8_E4M3", shape)
            found[f"{base}.weight_scale_inv"] = ("F32", tuple(math.ceil(n / 128) for n in shape))
        elif family == "kimi_k25" and ".experts." in name:
            found[f"{base}.weight_packed"] = ("I32", (shape[0], shape[1] // 8))
            found[f"{base}.weight_scale"] = ("BF16", (shape[0], shape[1] // 32))
            found[f"{base}.weight_shape"] = ("I32", (2,))
        else:
            found[name] = ("F32" if name.endswith("e_score_correction_bias") else "BF16", shape)
    if family == "kimi_k25":
        found["vision_tower.patch.weight"] = ("BF16", (3, 4))
    return found


def safetensors(names: list[str], tensors: dict[str, tuple[str, tuple[int, ...]]]) -> dict[str, Any]:
    """A safetensors file as a tree: its header and the number of bytes behind it; `safetensors_bytes` makes it."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name in names:
        dtype, shape = tensors[name]
        size = math.prod(shape) * ITEM_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    return {"header": header, "length": None, "data": at}


def safetensors_bytes(tree: Any) -> bytes:
    """The bytes of a file given as `safetensors` does; ``length``: what it claims its header has."""
    if not isinstance(tree, dict) or "header" not in tree:
        return folders.content_of("", tree)
    header = folders.content_of("", tree["header"])
    claimed = tree.get("length")
    length = claimed % (1 << 64) if type(claimed) is int else len(header)
    data = tree.get("data")
    zeros = bytes(min(data, 1 << 16)) if type(data) is int and data > 0 else data if isinstance(data, bytes) else b""
    return length.to_bytes(8, "little") + header + zeros


@cache
def folder(family: str, files: int = 1) -> dict[str, Any]:
    """An HF folder as a tree; `written` makes it."""
    tensors = _tensors(family)
    names = list(tensors)
    tree: dict[str, Any] = {"config.json": config(family), "generation_config.json": {"eos_token_id": 2}}
    if files == 1:
        return tree | {"model.safetensors": safetensors(names, tensors)}
    weight_map = {name: f"model-{k % files + 1}-of-{files}.safetensors" for k, name in enumerate(names)}
    for file in sorted(set(weight_map.values())):
        tree[file] = safetensors([name for name in names if weight_map[name] == file], tensors)
    return tree | {"model.safetensors.index.json": {"metadata": {"total_size": 1}, "weight_map": weight_map}}


def written(place: Path, tree: Any) -> Path:
    """The folder of a tree on disk."""
    files = copy.copy(tree) if isinstance(tree, dict) else {}
    for name, content in files.items():
        if name.endswith(".safetensors"):
            files[name] = safetensors_bytes(content) if isinstance(content, dict) else content
    folders.write(place, files)
    return place


@cache
def checkpoint(family: str) -> dict[str, bytes]:
    """The files of the Megatron checkpoint that a family's folder is converted to."""
    with TemporaryDirectory() as place:
        source = written(Path(place, "hf"), folder(family))
        execute(plan_to_megatron(open_model(source)), f"{place}/mg", 1, Share(), Silence())
        return folders.read(Path(place, "mg"))


class Silence:
    """A progress that nobody watches."""

    def start(self, what: str, total: int, done: int = 0) -> None: ...

    def advance(self, nbytes: int) -> None: ...

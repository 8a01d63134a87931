"""Model folders as people have them, small and without data, and what a check of them says."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparse_models import Stored, stored_as, write_file, write_weights
from tiny_configs import FP8, INT4, raw_config

from megatron_fleet.weights.hf_folder import INDEX, SINGLE
from megatron_fleet.weights.mapping import WeightTable

TINY = Path(__file__).parents[1] / "assets" / "tiny"
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 4976698672\n"
UP, HEAD, EMBEDDING = "model.layers.0.mlp.up_proj.weight", "lm_head.weight", "model.embed_tokens.weight"
ONE, TWO, THREE = (f"model-0000{k}-of-00003.safetensors" for k in (1, 2, 3))
BLOCKS = {"hidden_size": 256, "intermediate_size": 256, "quantization_config": FP8}


def write(folder: Path, family: str = "qwen3", tensors: Callable[[dict], Stored] = stored_as, files: int = 1, **fields):
    """A folder of a tiny model with changed fields of config.json, its tokenizer and weights without data."""
    folder.mkdir(parents=True, exist_ok=True)
    config = raw_config(family, "v4") | {"vocab_size": 1000, "max_position_embeddings": 2048} | fields
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 3]}')
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / name, folder)
    return write_weights(folder, tensors(config), files)


def changed(**changes: Any) -> Callable[[dict], Stored]:
    """Tensors of a config.json with others in place of some; ``None``: without it. Dots are written ``__``."""
    edits = {name.replace("__", "."): value for name, value in changes.items()}

    def make(config: dict) -> Stored:
        return {name: value for name, value in (stored_as(config) | edits).items() if value is not None}

    return make


def in_fp8(scales: str) -> Callable[[dict], Stored]:
    def make(config: dict) -> Stored:
        layers = [n for n in WeightTable(config).tensors if "_proj" in n]
        return stored_as(config, fp8=layers, scales=scales)

    return make


def edit(folder: Path, name: str, **fields: Any) -> None:
    path = folder / name
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@dataclass(frozen=True)
class Case:
    """A folder, by ``write`` and then ``damage``; ``said``: a part of the refusal, ``None``: it is accepted.

    ``weights_alone``: conversion, which needs no tokenizer and no engine, accepts it.
    """

    said: str | None = None
    damage: Callable[[Path], object] = lambda folder: None
    made: dict[str, Any] | None = None
    weights_alone: bool = False


def declared(method: str, **more: Any) -> dict[str, Any]:
    return {"quantization_config": {"quant_method": method, **more}}


def of_format(name: str) -> dict[str, Any]:
    return declared("compressed-tensors", format=name, config_groups={"group_0": {"weights": {"num_bits": 8}}})


def without_index(folder: Path) -> None:
    (folder / INDEX).unlink()


def with_pointer(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(POINTER)


def cut(folder: Path) -> None:
    path = folder / SINGLE
    os.truncate(path, path.stat().st_size - 1)


def extra(name: str, tensor: str = "other.weight") -> Callable[[Path], object]:
    return lambda folder: write_file(folder / name, {tensor: ("BF16", (4, 4))})


def misplaced(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"][UP] = next(file for file in (ONE, TWO, THREE) if file != index["weight_map"][UP])
    (folder / INDEX).write_text(json.dumps(index))


SHARDED = {"files": 3}
CASES = {
    # Accepted: formats, dtypes, sources.
    "bfloat16": Case(),
    "float32": Case(made={"tensors": lambda config: stored_as(config, "F32")}),
    "float16": Case(made={"tensors": lambda config: stored_as(config, "F16")}),
    "several files": Case(made=SHARDED),
    "qwen2": Case(made={"family": "qwen2"}),
    "experts": Case(made={"family": "qwen3_moe"}),
    "yarn": Case(made={"family": "qwen3_yarn", "max_position_embeddings": 4096}),
    "tied": Case(made={"family": "qwen3_tied"}),
    "tied, and the head is stored": Case(
        made={"family": "qwen3_tied", "tensors": changed(lm_head__weight=("BF16", (1000, 96)))}
    ),
    "fp8": Case(made={"tensors": in_fp8("F32"), **BLOCKS}),
    "fp8 with scales in bfloat16": Case(made={"tensors": in_fp8("BF16"), **BLOCKS}),
    "fp8 with scales in float16": Case(made={"tensors": in_fp8("F16"), **BLOCKS}),
    "fields of other writers": Case(made={"unsloth_fixed": True, "unsloth_version": "2026.9.4", "new_field": None}),
    "no chat template": Case(damage=lambda folder: (folder / "tokenizer_config.json").unlink()),
    "no generation config": Case(damage=lambda folder: (folder / "generation_config.json").unlink()),
    # Quantised forms.
    "awq": Case("(AWQ, ", made=declared("awq", bits=4)),
    "gptq": Case("(GPTQ, ", made=declared("gptq", bits=4)),
    "bitsandbytes": Case("(bitsandbytes, ", made=declared("bitsandbytes", load_in_4bit=True)),
    "mxfp4": Case("(MXFP4, ", made=declared("mxfp4")),
    "modelopt": Case("or NVFP4)", made=declared("modelopt", quant_algo="NVFP4")),
    "nvfp4": Case("(NVFP4, ", made=of_format("nvfp4-pack-quantized")),
    "fp8 with one scale per row": Case("(FP8 with one scale per tensor or row)", made=of_format("float-quantized")),
    "fp8 with other blocks": Case("weight_block_size=[64, 64]", made=declared("fp8", weight_block_size=[64, 64])),
    "awq that config.json does not name": Case(
        "quantised as AWQ or GPTQ", made={"tensors": changed(model__layers__0__mlp__up_proj__qweight=("I32", (96, 14)))}
    ),
    "bitsandbytes that config.json does not name": Case(
        "quantised as bitsandbytes", made={"tensors": changed(**{f"{UP}.absmax".replace(".", "__"): ("F32", (8,))})}
    ),
    "fp8 that config.json does not name": Case(
        "has no quantization_config of fp8",
        made={"tensors": in_fp8("F32"), **BLOCKS, "quantization_config": None},
        weights_alone=True,
    ),
    "fp8 that is not there": Case("and no tensor is stored so", made=BLOCKS, weights_alone=True),
    "int4 that is not there": Case(
        "and no tensor is stored so", made={"quantization_config": INT4}, weights_alone=True
    ),
    # Damage.
    "pointer instead of weights": Case("is a Git LFS pointer", with_pointer(TWO), SHARDED),
    "pointer instead of the tokenizer": Case("is a Git LFS pointer", with_pointer("tokenizer.json")),
    "no index": Case(f"and {INDEX}, which lists them, is missing", without_index, SHARDED),
    "missing file": Case(f"missing although {INDEX} lists it", lambda folder: (folder / TWO).unlink(), SHARDED),
    "file of another version": Case(f"{INDEX} does not list it", extra("model-00004-of-00009.safetensors"), SHARDED),
    "index of other files": Case(f"is missing although {INDEX} lists it", misplaced, SHARDED),
    "truncated": Case("not a whole safetensors file", cut),
    "pickled weights": Case(
        "pytorch_model.bin cannot be read", lambda folder: (folder / SINGLE).rename(folder / "pytorch_model.bin")
    ),
    "consolidated weights next to the index": Case(
        "engines would load it instead of", extra("consolidated.safetensors"), SHARDED, weights_alone=True
    ),
    "adapter next to the weights": Case(
        "engines would load both", extra("adapter_model.safetensors"), weights_alone=True
    ),
    # Contradictions between files.
    "resized embedding": Case(
        "with vocab_size=1008 if the embedding was resized",
        made={"tensors": changed(model__embed_tokens__weight=("BF16", (1008, 96)))},
    ),
    "another hidden size": Case(
        "config.json asks for [1000, 64]", lambda folder: edit(folder, "config.json", hidden_size=64)
    ),
    "fewer layers in config.json": Case(
        "is not part of the model", lambda folder: edit(folder, "config.json", num_hidden_layers=2)
    ),
    "no head": Case("tensor lm_head.weight is missing", made={"tensors": changed(lm_head__weight=None)}),
    "unknown field": Case("mystery=2 is an unknown field", lambda folder: edit(folder, "config.json", mystery=2)),
    "tokenizer beyond the embedding": Case(
        "the tokenizer has ids up to 973", made={"vocab_size": 515}, weights_alone=True
    ),
    "end of a turn beyond the embedding": Case(
        "eos_token_id=1000 is beyond the 1000 rows",
        lambda folder: edit(folder, "generation_config.json", eos_token_id=[2, 1000]),
        weights_alone=True,
    ),
}

"""A Megatron checkpoint: ``.metadata``, common state, data files, what it keeps of its HF folder; and that of a run."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path
from typing import Any

from fuzz import folders, models, pickles
from fuzz.engine import Surface
from fuzz.outcomes import command

from megatron_fleet.weights.torch_dist import archive
from megatron_fleet.weights.torch_dist.pickle_reader import unpickle

NAMES = ("torch", "collections", "argparse", "builtins.set")
ARGUMENTS = {
    "num_layers": 2,
    "hidden_size": 8,
    "ffn_hidden_size": 8,
    "num_attention_heads": 2,
    "kv_channels": 8,
    "group_query_attention": True,
    "num_query_groups": 1,
    "norm_epsilon": 1e-6,
    "qk_layernorm": True,
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "add_qkv_bias": False,
    "position_embedding_type": "rope",
    "rotary_base": 1000000,
    "untie_embeddings_and_output_weights": True,
    "vocab_size": 7,
    "max_position_embeddings": 256,
    "tensor_model_parallel_size": 1,
}


@cache
def seeds() -> list[Any]:
    found: list[Any] = []
    for family in models.FAMILIES:
        files: dict[str, Any] = dict(models.checkpoint(family))
        found.append(files)
        structured = files | {
            "release/.metadata": {"pickle": pickles.to_tree(unpickle(files["release/.metadata"], NAMES))},
            "release/common.pt": {"archive": _common(files["release/common.pt"])},
        }
        found.append(structured)
        if family in ("qwen3", "kimi_k25"):
            found.append(_of_run(structured, family))
    plain = {name: file for name, file in found[1].items() if not name.startswith("hf/")}
    arguments = {"$call": ["argparse.Namespace", {"$tuple": []}, ARGUMENTS]}
    state = plain["release/common.pt"]["archive"] | {"args": arguments, "iteration": 5}
    return [*found, plain | {"release/common.pt": {"archive": state}}]


def _common(data: bytes) -> Any:
    (content,) = (data[start:end] for name, start, end in archive.records(data) if name == "data.pkl")
    return pickles.to_tree(unpickle(content, NAMES))


def _of_run(files: dict[str, Any], family: str) -> dict[str, Any]:
    """The same weights as a run of this project keeps them; the manifest is made when the files are written."""
    step = "checkpoints/step_000010/"
    own = {step + name.removeprefix("release/"): file for name, file in files.items() if name.startswith("release/")}
    model = {f"model/{name}": file for name, file in models.folder(family).items()}
    manifest = {"format": 1, "step": 10, "files": {}}
    return own | model | {step + "manifest.json": manifest, "config.json": {"model": {"path": "MODEL"}}}


def check(tree: Any, folder: Path) -> bool:
    files = dict(tree) if isinstance(tree, dict) else {}
    place, out = folder / "run", folder / "hf"
    for name, content in files.items():
        files[name] = _content(name, content, files, place)
    folders.write(place, files)
    inspected = command("convert", "inspect", place)
    command("convert", "inspect", place, "--json", "--every")
    converted = command("convert", "to-hf", place, out, "--workers", 1)
    assert out.exists() == (converted.status == 0)
    if converted.status == 0:
        assert command("convert", "verify", place, out, "--workers", 1, allowed=(0, 1, 2)).status != 2
    return inspected.status == converted.status == 0


def _content(name: str, content: Any, files: dict[str, Any], place: Path) -> Any:
    if isinstance(content, dict) and list(content) == ["pickle"]:
        return pickles.pickled(content["pickle"])
    if isinstance(content, dict) and list(content) == ["archive"]:
        return pickles.archived(content["archive"])
    if name.endswith(".safetensors") and isinstance(content, dict):
        return models.safetensors_bytes(content)
    if name.endswith("manifest.json") and isinstance(content, dict) and content.get("files") == {}:
        folder = name.removesuffix("manifest.json")
        own = {n.removeprefix(folder): c for n, c in files.items() if n.startswith(folder) and isinstance(c, bytes)}
        return content | {
            "files": {n: {"bytes": len(c), "sha256": hashlib.sha256(c).hexdigest()} for n, c in own.items()}
        }
    if name == "config.json" and content == {"model": {"path": "MODEL"}}:
        return {"model": {"path": str(place / "model")}}
    return content


SURFACE = Surface("checkpoint", 60, seeds, check, words=("torch.float32", "embedding.word_embeddings.weight", "$call"))

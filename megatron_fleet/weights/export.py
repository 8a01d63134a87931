"""Export of the live model to an HF folder that ``transformers`` and vLLM load."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

from megatron_fleet.config.errors import UserError
from megatron_fleet.models.hf_config import drop_quantization
from megatron_fleet.platform.communicator import Communicator, together
from megatron_fleet.storage.local import begin_folder, commit_folder
from megatron_fleet.weights.exchange import ParamMeta
from megatron_fleet.weights.hf_folder import INDEX, NOTES, SINGLE, read_config
from megatron_fleet.weights.source import MegatronWeightSource

SHARD_BYTES = 5_000_000_000
"""Maximum safetensors file size, same as the Hub's own tools."""

COMPANIONS = (".json", ".txt", ".jinja", ".model", ".tiktoken", ".py")
"""Suffixes of the template's non-weight files that belong to the model (tokenizer, generation config, code)."""


def export_hf(
    source: MegatronWeightSource,
    template: Path | str,
    out: Path | str,
    *,
    world: Communicator,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Export the current weights as an HF folder; collective over ``world``.

    World rank 0 writes (and must be rank 0 of its model replica). The folder appears atomically, by a rename, and
    replaces an earlier export.

    Args:
        template: HF folder whose config and tokenizer files are copied; ``config.json`` gets the exported dtype, and
            does not say any more that weights are quantised.
        out: folder to create.
        shard_bytes: maximum safetensors file size.

    Raises:
        UserError: the template cannot be read, or ``out`` is a folder other than an HF export; raised on every rank.
    """
    out = Path(out)
    partial: Path | None = None
    with together(world):
        if world.rank == 0:
            partial = _start(Path(template), out, source.metadata()[0].dtype)
    with together(world):
        if source.place.replica == 0:
            _stream(source, partial, shard_bytes)
    with together(world):
        if partial is not None:
            _finish(partial, out)


def _start(template: Path, out: Path, dtype: torch.dtype) -> Path:
    """A temporary folder next to ``out`` with everything but the weights."""
    config = read_config(template)
    if out.exists() and not (out / "config.json").exists() and (out.is_file() or any(out.iterdir())):
        raise UserError(f"{out} exists and is not an HF folder; choose another place for the export.")
    partial = begin_folder(out)
    for file in sorted(template.iterdir()):
        belongs = file.suffix in COMPANIONS and file.name not in NOTES
        if file.is_file() and belongs and not file.name.endswith(".safetensors.index.json"):
            shutil.copyfile(file, partial / file.name)
    key = "dtype" if "dtype" in config else "torch_dtype"
    config[key] = str(dtype).removeprefix("torch.")
    drop_quantization(config)
    (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return partial


def _stream(source: MegatronWeightSource, partial: Path | None, shard_bytes: int) -> None:
    """Iterate the source on every rank of the replica; write files where ``partial`` is set.

    The source is iterated to its end even if writing fails, because the other ranks iterate in lockstep.
    """
    error: OSError | None = None
    tensors = iter(source)
    files = _files(source.metadata(), shard_bytes)
    for name, metadata in files.items():
        held = _take(tensors, len(metadata), keep=partial is not None and error is None)
        if partial is not None and error is None:
            try:
                save_file(held, partial / name, metadata={"format": "pt"})
            except (OSError, RuntimeError) as e:
                error = OSError(f"{partial / name}: {e}")
    if error is not None:
        shutil.rmtree(partial or "", ignore_errors=True)
        raise error
    if partial is not None and len(files) > 1:
        index = {
            "metadata": {"total_size": sum(m.nbytes for metadata in files.values() for m in metadata)},
            "weight_map": {m.name: name for name, metadata in files.items() for m in metadata},
        }
        (partial / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _files(metadata: list[ParamMeta], shard_bytes: int) -> dict[str, list[ParamMeta]]:
    """File name → its tensors, in order, each file at most ``shard_bytes`` (or a single tensor)."""
    files: list[list[ParamMeta]] = [[]]
    size = 0
    for meta in metadata:
        if files[-1] and size + meta.nbytes > shard_bytes:
            files.append([])
            size = 0
        files[-1].append(meta)
        size += meta.nbytes
    if len(files) == 1:
        return {SINGLE: files[0]}
    return {f"model-{k:05d}-of-{len(files):05d}.safetensors": file for k, file in enumerate(files, 1)}


def _take(tensors: Iterator[tuple[str, torch.Tensor]], count: int, keep: bool) -> dict[str, torch.Tensor]:
    held = {}
    for _ in range(count):
        name, tensor = next(tensors)
        if keep:
            held[name] = tensor.cpu()
    return held


def _finish(partial: Path, out: Path) -> None:
    for file in partial.iterdir():
        file.chmod(partial.stat().st_mode & 0o666)  # safetensors creates files that only their owner can read
        with file.open("rb") as f:
            os.fsync(f.fileno())
    commit_folder(partial, out)

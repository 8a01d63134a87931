"""HF folders, checkpoints as Megatron-LM leaves them, and the command line, for the tests of conversion."""

from __future__ import annotations

import argparse
import io
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tiny_models import dequantise, stored_tensors
from torch_dist_files import Grid, save_with_torch
from waiting import HANG_S

from megatron_fleet.convert import content
from megatron_fleet.convert.content import ProducedRows
from megatron_fleet.weights.hf_folder import read_config
from megatron_fleet.weights.hf_model import make_table
from megatron_fleet.weights.hf_rows import PerThread
from megatron_fleet.weights.mapping import Matrix, stack_key

Tensors = dict[str, torch.Tensor]
PROGRAM = "import sys; from megatron_fleet import cli; sys.exit(cli.main(sys.argv[1:]))"


class Silence:
    """A progress that nobody watches."""

    def start(self, what: str, total: int, done: int = 0) -> None:
        pass

    def advance(self, nbytes: int) -> None:
        pass


def files(folder: Path) -> dict[str, bytes]:
    """All files of a folder but the conversion's own journal."""
    found = {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    found.pop("conversion.json", None)
    return found


def command(*arguments: object, program: str = PROGRAM) -> list[str]:
    return [sys.executable, "-c", program, "convert", *map(str, arguments)]


def mfleet(*arguments: object, program: str = PROGRAM, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run ``mfleet convert …`` in a process of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command(*arguments, program=program), capture_output=True, text=True, timeout=HANG_S, env=environment, **options
    )


def change(hf_dir: Path, edit: Callable[[str, torch.Tensor], torch.Tensor | None]) -> None:
    """Rewrite the tensors of a folder that has one name per file; ``None`` leaves one as it is."""
    for file in sorted(hf_dir.glob("*.safetensors")):
        tensors = load_file(file)
        for name, tensor in tensors.items():
            changed = edit(name, tensor)
            tensors[name] = tensor if changed is None else changed.contiguous()
        save_file(tensors, file, metadata={"format": "pt"})


def megatron_tensors(hf_dir: Path, numbered: bool, dtype: torch.dtype | None = None) -> Tensors:
    """The whole tensors that Megatron would save for a folder's weights: fused, stacked, vocabulary not padded.

    Args:
        dtype: of the weights; ``None``: the folder's own, bfloat16 for quantised ones.
    """
    stored = stored_tensors(hf_dir)
    weights = dequantise(stored)
    table = make_table(read_config(hf_dir), stored)
    layers, experts = table.model.layers, table.model.experts
    parts: dict[str, dict[tuple[int, ...], torch.Tensor]] = {}
    for matrix in table.matrices():
        key, lead = _address(matrix, numbered)
        parts.setdefault(key, {})[lead] = torch.cat([weights[p.tensor][slice(*p.tensor_rows)] for p in matrix.pieces])
    out = {}
    for key, found in parts.items():
        lead = next(iter(found))
        counts = (
            (layers, experts)[: len(lead)]
            if len(lead) == 2
            else ((experts,) if "experts.experts" in key else (layers,)) * len(lead)
        )
        whole = (
            torch.stack([found[k] for k in sorted(found)]).reshape(*counts, *found[lead].shape) if lead else found[lead]
        )
        out[key] = whole.to(torch.float32 if "expert_bias" in key else dtype or torch.bfloat16)
    return out


def _address(matrix: Matrix, numbered: bool) -> tuple[str, tuple[int, ...]]:
    expert = () if matrix.expert is None else (matrix.expert,)
    key, layer = stack_key(matrix.key)
    return (matrix.key, expert) if numbered or layer is None else (key, (layer, *expert))


def write_foreign(
    root: Path,
    tensors: Mapping[str, torch.Tensor],
    ranks: int = 2,
    padding: int = 0,
    common_object: bool = False,
    arguments: Mapping[str, Any] | None = None,
) -> Path:
    """A run folder as Megatron-LM leaves it: tensors cut for ``ranks`` tensor-parallel ranks, optimizer, objects.

    Args:
        padding: rows of garbage behind the vocabulary.
        arguments: of Megatron-LM, that the checkpoint keeps; ``None`` = too few to tell the model.
        common_object: the common state as Megatron-Core 0.19 keeps it, not in ``common.pt``.
    """
    state: dict[str, Any] = {}
    for key, tensor in tensors.items():
        if padding and key in ("embedding.word_embeddings.weight", "output_layer.weight"):
            tensor = torch.cat([tensor, torch.full((padding, *tensor.shape[1:]), 7.0, dtype=tensor.dtype)])
        state[key] = Grid(tensor, _cuts(key, tensor, ranks))
        state[f"optimizer.state.exp_avg.{key}"] = torch.zeros(3)
    for name in ("rng_state/shard_0.0_1.1", "decoder.layers.0.self_attention.linear_qkv._extra_state/shard_0_1"):
        state[name] = _saved({"any": "thing"})
    arguments = arguments or {"num_layers": 4, "hidden_size": 96}
    args = argparse.Namespace(tensor_model_parallel_size=ranks, lr=1e-5, fp8=None, **arguments)
    common = {"args": args, "checkpoint_version": 3.0, "iteration": 100, "opt_param_scheduler": {"max_lr": 1e-5}}
    if common_object:
        state["common_state/shard_0_1"] = _saved([common])
    folder = root / "iter_0000100"
    save_with_torch(folder, state)
    if common_object:
        (folder / "common.pt").unlink()
    else:
        (folder / "common.pt").write_bytes(_saved(common).getvalue())
    (root / "latest_checkpointed_iteration.txt").write_text("100")
    return root


def _cuts(key: str, tensor: torch.Tensor, ranks: int) -> list[list[int]]:
    """Where the parts of ranks begin: rows of most matrices, columns of those that read a split input."""
    cuts: list[list[int]] = [list(range(1, n)) for n in tensor.shape]
    last = ("linear_fc2.weight", "linear_proj.weight")
    split = tensor.ndim - 1 if key.endswith(last) else max(tensor.ndim - 2, 0)
    # Leading axes are layers and experts: one part for each.
    for axis in range(max(tensor.ndim - 2, 0), tensor.ndim):
        n = tensor.shape[axis]
        cuts[axis] = [n * r // ranks for r in range(1, ranks)] if axis == split else []
    if tensor.ndim == 1:
        cuts = [[]]
    return cuts


def _saved(value: Any) -> io.BytesIO:
    out = io.BytesIO()
    torch.save(value, out)
    out.seek(0)
    return out


class ArrayReader:
    """Rows of arrays in memory, and which were asked for."""

    def __init__(self, arrays: Mapping[str, Any], dtypes: Mapping[str, str]) -> None:
        self._arrays, self._dtypes = arrays, dtypes
        self.asked: list[tuple[int, int]] = []

    def dtype(self, tensor: str) -> str:
        return self._dtypes[tensor]

    def read_rows(self, tensor: str, rows: tuple[int, int]) -> Any:
        self.asked.append(rows)
        return self._arrays[tensor][slice(*rows)]

    def for_threads(self) -> PerThread[Any]:
        return PerThread(lambda: self)


class Made(ProducedRows):
    """Rows whose bytes are known; asks what it may be asked."""

    def __init__(self, count, row_bytes, granule, source_row_bytes):
        super().__init__(count, row_bytes, granule)
        self.whole = np.random.default_rng(count * 31 + row_bytes).integers(0, 256, (count, row_bytes), np.uint8)
        self.granule, self.source, self.asked = granule, source_row_bytes, []

    def source_row_bytes(self):
        return self.source

    def make(self, rows):
        assert 0 <= rows[0] < rows[1] <= len(self.whole)
        assert rows[0] % self.granule == 0
        assert rows[1] % self.granule == 0 or rows[1] == len(self.whole)
        assert rows[1] - rows[0] <= max(self.granule, content.STEP_BYTES // max(1, self.source))
        self.asked.append(rows)
        return self.whole[slice(*rows)]

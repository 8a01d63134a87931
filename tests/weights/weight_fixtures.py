"""Tiny HF folders, Megatron-shaped modules and simulated ranks."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from megatron_fleet.weights.mapping import WeightTable


def tiny_config(**over: Any) -> dict[str, Any]:
    """A Qwen3 config whose vocabulary no tensor-parallel size divides."""
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "intermediate_size": 48,
        "vocab_size": 101,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    return {**config, **over}


def random_tensors(config: dict[str, Any], dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: (torch.randn(shape, generator=generator) * 0.1).to(dtype)
        for name, shape in WeightTable(config).tensors.items()
    }


def write_folder(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor], files: int = 1) -> Path:
    """An HF folder; more than one file makes it indexed."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if files == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    names = list(tensors)
    weight_map = {n: f"model-{k % files + 1:05d}-of-{files:05d}.safetensors" for k, n in enumerate(names)}
    for file in sorted(set(weight_map.values())):
        save_file({n: tensors[n] for n in names if weight_map[n] == file}, folder / file, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


class MegatronShaped(nn.Module):
    """A chunk with the parameter names, shapes and layer numbers of GPTModel, filled with NaN."""

    def __init__(
        self,
        config: dict[str, Any],
        layers: range,
        first: bool,
        last: bool,
        tp_size: int,
        spec: int,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        table = WeightTable(config)
        padded = -(-config["vocab_size"] // tp_size) * tp_size + 2 * tp_size
        for name in table.parameters(layers, first, last, spec):
            shape = table.local_shape(name, tp_size, padded if table.is_vocabulary(name) else None)
            path = name.split(".")
            if "layers" in path:
                at = path.index("layers") + 1
                number = int(path[at])
                path[at] = str(number - layers.start)
            module: nn.Module = self
            for k, part in enumerate(path[:-1]):
                if part not in dict(module.named_children()):
                    module.add_module(part, nn.Module())
                module = module.get_submodule(part)
                if k and path[k - 1] == "layers":
                    module.layer_number = number + 1
            module.register_parameter(path[-1], nn.Parameter(torch.full(shape, float("nan"), dtype=dtype)))


def stage_chunks(
    config: dict[str, Any], tp_size: int, pp_rank: int, pp_size: int, spec: int = 0, dtype: torch.dtype = torch.float32
) -> list[nn.Module]:
    """The chunks of one rank: a pipeline stage of consecutive layers."""
    n = config["num_hidden_layers"] // pp_size
    layers = range(pp_rank * n, (pp_rank + 1) * n)
    return [MegatronShaped(config, layers, pp_rank == 0, pp_rank == pp_size - 1, tp_size, spec, dtype)]


class ThreadCommunicator:
    """Ranks as threads of one process."""

    def __init__(self, rank: int, shared: dict[str, Any]) -> None:
        self.rank, self._shared = rank, shared
        self.size = shared["barrier"].parties

    def all_gather(self, value: Any) -> list[Any]:
        self._shared["slots"][self.rank] = value
        self._shared["barrier"].wait(20)
        values = list(self._shared["slots"])
        self._shared["barrier"].wait(20)
        return values

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        values = self.all_gather(tensor.clone() if self.rank == source else None)
        tensor.copy_(values[source])


def run_ranks(size: int, body: Callable[[ThreadCommunicator], Any]) -> list[Any]:
    """Run ``body`` once per simulated rank; results in order, exceptions as values."""
    shared = {"barrier": threading.Barrier(size), "slots": [None] * size}
    results: list[Any] = [None] * size

    def run(rank: int) -> None:
        try:
            results[rank] = body(ThreadCommunicator(rank, shared))
        except Exception as e:
            results[rank] = e

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results

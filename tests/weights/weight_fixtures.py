"""Tiny HF folders, Megatron-shaped modules and simulated ranks."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from megatron_fleet.config.schema import ParallelConfig
from megatron_fleet.trainer.megatron import parallel
from megatron_fleet.weights.mapping import WeightTable

# isort: split
# After our own package, which makes Megatron-Core importable here.
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory


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
    """A chunk with the parameters of GPTModel on tensor-parallel rank ``tp[0]`` of ``tp[1]``, filled with NaN.

    It describes them as Megatron does: layers stacked, the halves of SwiGLU by themselves, the vocabulary padded.
    """

    def __init__(
        self, config: dict[str, Any], layers: range, first: bool, last: bool, tp: tuple[int, int], dtype: torch.dtype
    ) -> None:
        super().__init__()
        self._tp, self._count, self._dtype = tp, config["num_hidden_layers"], dtype
        self._described: list[tuple[str, nn.Parameter, int | None, int | None]] = []
        hidden, ffn, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
        q, kv = (config[f"num_{x}_heads"] * head for x in ("attention", "key_value"))
        padded = -(-config["vocab_size"] // tp[1]) * tp[1] + 2 * tp[1]
        tied = config["tie_word_embeddings"]
        if first:
            self._add("embedding.word_embeddings.weight", (padded, hidden), 0)
        for layer in layers:
            self._add("self_attention.linear_qkv.layer_norm_weight", (hidden,), None, layer)
            self._add("self_attention.linear_qkv.weight", (q + 2 * kv, hidden), 0, layer)
            self._add("self_attention.q_layernorm.weight", (head,), None, layer)
            self._add("self_attention.k_layernorm.weight", (head,), None, layer)
            self._add("self_attention.linear_proj.weight", (hidden, q), 1, layer)
            self._add("mlp.linear_fc1.layer_norm_weight", (hidden,), None, layer)
            self._add("mlp.linear_fc1.weight", (2 * ffn, hidden), 0, layer)
            self._add("mlp.linear_fc2.weight", (hidden, ffn), 1, layer)
        if last:
            self._add("decoder.final_layernorm.weight", (hidden,), None)
            if not tied:
                self._add("output_layer.weight", (padded, hidden), 0)
            elif not first:  # Megatron calls the last stage's copy by the name of the embedding
                self._add("embedding.word_embeddings.weight", (padded, hidden), 0)

    def _add(self, key: str, shape: tuple[int, ...], shard: int | None, layer: int | None = None) -> None:
        local = [n // self._tp[1] if axis == shard else n for axis, n in enumerate(shape)]
        parameter = nn.Parameter(torch.full(local, float("nan"), dtype=self._dtype))
        self.register_parameter(f"{key}.{layer}".replace(".", "_"), parameter)
        self._described.append((key, parameter, shard, layer))

    def of(self, key: str, layer: int | None = None) -> nn.Parameter:
        """The parameter of a key without its layer."""
        return next(p for k, p, _, i in self._described if (k, i) == (key, layer))

    def described(self) -> list[tuple[str, int | None, nn.Parameter]]:
        """Key, layer, parameter."""
        return [(key, layer, p) for key, p, _, layer in self._described]

    def sharded_state_dict(self, metadata: dict[str, Any]) -> dict[str, Any]:
        assert metadata["singleton_local_shards"] is False
        out: dict[str, Any] = {}
        for key, parameter, shard, layer in self._described:
            lead = () if layer is None else ((0, layer, self._count),)
            offsets = () if shard is None else ((shard + len(lead), *self._tp),)
            name = key if layer is None else f"decoder.layers.{key}"
            tensor = ShardedTensor.from_rank_offsets(
                name, parameter, *lead, *offsets, prepend_axis_num=len(lead), allow_shape_mismatch="embed" in key
            )
            fused = key == "mlp.linear_fc1.weight"
            out[f"{name}.{layer}"] = apply_swiglu_sharded_factory(tensor, lead) if fused else tensor
        return out


def stage_chunks(
    config: dict[str, Any], tp: tuple[int, int], pp_rank: int, pp_size: int, dtype: torch.dtype = torch.float32
) -> list[nn.Module]:
    """The chunks of one rank (tensor-parallel rank and size): a pipeline stage of consecutive layers."""
    n = config["num_hidden_layers"] // pp_size
    layers = range(pp_rank * n, (pp_rank + 1) * n)
    return [MegatronShaped(config, layers, pp_rank == 0, pp_rank == pp_size - 1, tp, dtype)]


@contextmanager
def megatron_groups() -> Iterator[None]:
    """Megatron's process groups of a world of one, which descriptions of a model ask for."""
    parallel.initialise(ParallelConfig(), seed=0)
    try:
        yield
    finally:
        parallel.shutdown()


class Silence:
    """A progress that nobody watches."""

    def start(self, what: str, total: int, done: int = 0) -> None: ...

    def advance(self, nbytes: int) -> None: ...


class ThreadCommunicator:
    """Ranks as threads of one process."""

    def __init__(self, rank: int, shared: dict[str, Any]) -> None:
        self.rank, self._shared = rank, shared
        self.size = shared["barrier"].parties

    def all_gather(self, value: Any) -> list[Any]:
        self._shared["slots"][self.rank] = value
        self._shared["barrier"].wait(300)
        values = list(self._shared["slots"])
        self._shared["barrier"].wait(300)
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
        thread.join(300)
    return results

"""Models and configurations of the measurements, and their clocks."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import psutil
import torch

from battery.hardware import NO_ENGINE
from megatron_fleet.cluster.frames import array_from_plain
from megatron_fleet.config.schema import Config
from megatron_fleet.platform.device import device
from megatron_fleet.trainer.process import prepare_process
from megatron_fleet.tuning.trial import random_micro_batch

if TYPE_CHECKING:
    from megatron_fleet.algorithms.datum import Datum
    from megatron_fleet.trainer.megatron.policy import MegatronPolicy
    from megatron_fleet.trainer.verbs import RankVerbs

QWEN3_8B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_hidden_layers": 36,
    "rms_norm_eps": 1e-6,
    "vocab_size": 151936,
    "rope_theta": 1e6,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
    "torch_dtype": "bfloat16",
}
TINY = QWEN3_8B | {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "num_hidden_layers": 2,
    "vocab_size": 512,
}
"""Sides are multiples of 128, as FP8 in blocks needs."""
MATRIX = {"full": 8192, "tiny": 64}
COPY_BYTES = {"full": 4 << 30, "tiny": 1 << 20}
SMALL_VOCABULARY = 1024
"""Vocabulary for measuring layers alone: so small that the output layer costs nothing."""


def model_config(size: str, layers: int, vocabulary: int | None = None) -> dict[str, Any]:
    """``config.json`` of Qwen3-8B's widths with so many layers; ``tiny``: of small widths and at most two layers."""
    base = QWEN3_8B if size == "full" else TINY
    layers = layers if size == "full" else min(layers, 2)
    vocabulary = base["vocab_size"] if vocabulary is None else min(vocabulary, base["vocab_size"])
    return base | {"num_hidden_layers": layers, "vocab_size": vocabulary}


def write_config(folder: Path, hf: Mapping[str, Any]) -> Path:
    """An HF folder without weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf, indent=2), encoding="utf-8")
    return folder


def write_model(folder: Path, hf: Mapping[str, Any]) -> Path:
    """An HF folder with random BF16 weights, made on the device."""
    from safetensors.torch import save_file

    from megatron_fleet.weights.mapping import WeightTable

    where = device()
    torch.manual_seed(0)
    deviation = hf.get("text_config", hf)["initializer_range"]
    tensors = {}
    for name, shape in WeightTable(dict(hf)).tensors.items():
        values = torch.empty(shape, dtype=torch.bfloat16, device=where)
        tensors[name] = (values.fill_(1) if len(shape) == 1 else values.normal_(0, deviation)).cpu()
    write_config(folder, hf)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def run_config(model: Path, tokens: int, **sections: Mapping[str, Any]) -> Config:
    """Configuration of a run in BF16 with micro-batches, and episodes, of up to ``tokens``.

    Layers are those of Transformer Engine where it works, PyTorch's elsewhere, unless ``policy`` says otherwise.

    Args:
        sections: added to the sections ``policy``, ``precision``, ``parallel`` and ``engine`` (of ``rollout``).
    """
    policy = dict(sections.get("policy", {}))
    optimizer = {"lr": 1e-6, "betas": [0.9, 0.95], **policy.pop("optimizer", {})}
    kernels = "torch" if cuda() and os.environ[NO_ENGINE] else "auto"
    return Config.model_validate(
        {
            "run": {"name": "battery", "out": str(model), "steps": 1},
            "model": {"path": str(model), "dtype": "bfloat16"},
            "precision": dict(sections.get("precision", {})),
            "parallel": dict(sections.get("parallel", {})),
            "policy": {"micro_batch_tokens": tokens, "kernels": kernels, **policy, "optimizer": optimizer},
            "rollout": {
                "prompts_per_step": 2,
                "samples_per_prompt": 2,
                "max_context": tokens,
                "sampling": {"max_tokens_per_turn": 16, "max_turns": 2},
                "engine": dict(sections.get("engine", {})),
            },
            "data": {"tasks": "embedded"},
        }
    )


def make_policy(config: Config) -> MegatronPolicy:
    """A trainer of one rank, or this rank's part of one, with random weights."""
    prepare_process(config.policy, config.parallel)  # before the first import of Megatron
    from megatron_fleet.trainer.megatron.policy import MegatronPolicy

    return MegatronPolicy(config, init="random")


def make_verbs(config: Config, init: Literal["hf", "random"]) -> RankVerbs:
    """The verbs of a trainer of one rank."""
    prepare_process(config.policy, config.parallel)
    from megatron_fleet.trainer.verbs import RankVerbs

    return RankVerbs(config.model_dump_json(), init)


def random_data(tokens: int, longest: int, vocabulary: int) -> list[Datum]:
    """A micro-batch of random tokens in sequences of up to ``longest``, all but the first of each trained."""
    return [*random_micro_batch(tokens, longest, vocabulary)]


def logprobs(verbs: RankVerbs, data: list[Datum]) -> np.ndarray:
    """Log-probs of the trained tokens at temperature 1, float32 ``[N]``."""
    found = verbs.forward([data], "current", 1.0)
    assert found is not None, "of the replica's first rank"
    return np.concatenate([array_from_plain(values) for values in found[0]])


def cuda() -> bool:
    """Whether this process measures a GPU."""
    return torch.cuda.is_available()


def wait() -> None:
    """Wait for the device."""
    if cuda():
        torch.cuda.synchronize()


def memory_used() -> int:
    """Bytes in use on this process's GPU, by all processes; without one, resident bytes of this process and those that
    it started.
    """
    if cuda():
        wait()
        free, total = torch.cuda.mem_get_info()
        return total - free
    own = psutil.Process()
    used = 0
    for process in [own, *own.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            used += process.memory_info().rss
    return used


def timed(function: Callable[[], object]) -> float:
    """Seconds of one call, all earlier work of the device excluded."""
    wait()
    start = time.perf_counter()
    function()
    wait()
    return time.perf_counter() - start


def median_seconds(function: Callable[[], object], repeats: int, warm_up: int = 1) -> float:
    """Median of the seconds of ``repeats`` calls after ``warm_up`` others."""
    for _ in range(warm_up):
        function()
    return statistics.median(timed(function) for _ in range(repeats))


def peak_bytes(function: Callable[[], object]) -> int | None:
    """Peak of PyTorch's device memory during a call, beyond what was there before; ``None`` on a CPU."""
    if not cuda():
        function()
        return None
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    function()
    wait()
    return torch.cuda.max_memory_allocated() - before


def matrix_tflops(size: str) -> float:
    """TFLOP/s of a BF16 matrix product of random numbers."""
    a, b = _square_matrices(size)
    out = torch.empty_like(a)
    return _tflops(lambda: torch.mm(a, b, out=out), len(a))


def matrix_fp8_tflops(size: str) -> float:
    """The same in FP8 (e4m3) with one scale per tensor."""
    a, b = (matrix.to(torch.float8_e4m3fn) for matrix in _square_matrices(size))
    one = torch.ones((), device=a.device)
    product = partial(torch._scaled_mm, a, b.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True)
    return _tflops(product, len(a))


def _square_matrices(size: str) -> list[torch.Tensor]:
    return [torch.randn(MATRIX[size], MATRIX[size], device=device(), dtype=torch.bfloat16) for _ in range(2)]


def _tflops(product: Callable[[], object], n: int) -> float:
    """FLOP/s of products of ``n`` × ``n`` matrices: the median of three runs of ten products."""

    def ten() -> None:
        for _ in range(10):
            product()

    return float(f"{10 * 2 * n**3 / median_seconds(ten, 3) / 1e12:.4g}")


def copy_tb_s(size: str) -> float:
    """TB/s, read and written, of a copy within the device's memory."""
    source = torch.ones(COPY_BYTES[size], dtype=torch.uint8, device=device())
    target = torch.empty_like(source)
    return float(f"{2 * len(source) / median_seconds(lambda: target.copy_(source), 5) / 1e12:.4g}")


def finite(value: float, digits: int = 4) -> float:
    """A rounded figure."""
    return float(np.format_float_positional(value, digits, fractional=False))

"""One training step against bare Megatron-Core on the same packed tokens. Prints one line of JSON.

``ratio`` is our step time ÷ that of Megatron's own GPTModel with its cross-entropy loss: same layers, same schedule,
same optimizer, same micro-batches. Steps of the two alternate, each as often first as second, and the median over pairs
is taken, so that a busy machine disturbs both alike. ``host_ms_per_micro_batch`` is what a micro-batch costs outside
the model: packing, arguments, loss inputs, and with CUDA their way to the device.

    python benchmarks/train_step.py [--family dense|moe] [--threads 2] [--trained 0.5] [--micro-batches 1] [--steps 20]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measured import stamp

from megatron_fleet.algorithms.datum import Datum
from megatron_fleet.algorithms.losses import make_loss
from megatron_fleet.config.schema import AlgorithmConfig, Config
from megatron_fleet.trainer.base import AdamParams
from megatron_fleet.trainer.megatron import build, optimizer, step
from megatron_fleet.trainer.megatron.build import fill_random
from megatron_fleet.trainer.megatron.policy import MegatronPolicy
from megatron_fleet.trainer.packing.pack import PackedMicroBatch, pack_micro_batch

# The head has Qwen3-8B's share of the multiplications, 8 %.
HF_CONFIG = {
    "model_type": "qwen3",
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_hidden_layers": 12,
    "rms_norm_eps": 1e-6,
    "vocab_size": 2048,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
}
EXPERTS = {
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "norm_topk_prob": True,
}
FAMILIES = {"dense": HF_CONFIG, "moe": HF_CONFIG | EXPERTS}


def make_config(folder: str, family: str, micro_batch_tokens: int, threads: int) -> Config:
    (Path(folder) / "config.json").write_text(json.dumps(FAMILIES[family]))
    tree = {
        "run": {"name": "benchmark", "out": folder, "steps": 1},
        "model": {"path": folder, "dtype": "bfloat16" if torch.cuda.is_available() else "float32"},
        "policy": {"micro_batch_tokens": micro_batch_tokens, "threads": threads, "optimizer": {"lr": 1e-4}},
        "rollout": {
            "prompts_per_step": 2,
            "samples_per_prompt": 2,
            "max_context": micro_batch_tokens,
            "sampling": {"max_tokens_per_turn": 64, "max_turns": 8},
        },
        "data": {"tasks": "embedded"},
    }
    return Config.model_validate(tree)


def make_micro_batch(micro_batch_tokens: int, trained: float) -> list[Datum]:
    """Sequences of about 400 tokens whose last part is trained."""
    rng = np.random.default_rng(0)
    micro_batch: list[Datum] = []
    while (left := micro_batch_tokens - sum(map(len, micro_batch))) >= 440:
        n = min(left, int(rng.integers(360, 440)))
        scale, mask = 1 / micro_batch_tokens, np.arange(n) >= max(1, round(n * (1 - trained)))
        tokens = rng.integers(0, HF_CONFIG["vocab_size"], n).astype(np.int32)
        weights, logprobs = (np.where(mask, v, 0).astype(np.float32) for v in (scale * rng.normal(), -7.6))
        micro_batch.append(Datum(tokens, mask, weights, logprobs, scale))
    return micro_batch


def bare_step(config: Config, family: str, micro_batch: PackedMicroBatch, count: int) -> Callable[[], None]:
    """A step of Megatron's own GPTModel: cross-entropy at every position, masked."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.pipeline_parallel import get_forward_backward_func

    dtype = getattr(torch, config.model.dtype)
    (model,) = build.build_chunks(
        FAMILIES[family], config.parallel, dtype, config.policy.micro_batch_tokens, model_class=GPTModel
    )
    fill_random([model], 0.02, 0, HF_CONFIG["vocab_size"])
    chunks = [optimizer.wrap(model)]
    adam = optimizer.build(chunks, config.policy.optimizer, dtype)
    where = next(model.parameters()).device
    tokens, positions = micro_batch.tokens[None].to(where), micro_batch.positions[None].to(where)
    labels, params = tokens.roll(-1, 1), step.micro_batch_params(micro_batch, where)
    mask = torch.zeros_like(tokens[0], dtype=torch.float32)
    mask[micro_batch.trained.to(where)] = micro_batch.loss_scale.to(where)

    def loss(losses: torch.Tensor) -> tuple[Any, ...]:
        total = (losses[0] * mask).sum()
        return total, torch.tensor(0, dtype=torch.int32, device=where), {"loss": total.detach()}

    def forward_step(_: Any, chunk: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
        return chunk(tokens, positions, None, labels=labels, packed_seq_params=params), loss

    def run() -> None:
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=None,
            model=chunks[0],
            num_microbatches=count,
            seq_length=len(micro_batch.tokens),
            micro_batch_size=1,
        )
        reduced = optimizer.reduce_gradients(chunks, adam)
        optimizer.step(chunks, adam, reduced, AdamParams.of(config.policy.optimizer, 1e-4))

    return run


def our_step(policy: MegatronPolicy, micro_batch: list[Datum], count: int) -> None:
    policy.forward_backward([micro_batch] * count, make_loss(AlgorithmConfig()))
    policy.optim_step(1e-4)


def host_ms(policy: MegatronPolicy, micro_batch: list[Datum]) -> float:
    """Milliseconds that a micro-batch costs beside the model, the median of many."""
    settings = step.Settings(1.0, 1024)
    where = next(policy.model_chunks[0].parameters()).device

    def prepare() -> None:
        packed = pack_micro_batch(micro_batch, sum(map(len, micro_batch)))
        step.model_inputs(packed, policy.model_chunks[0], settings, where)
        zeros = torch.zeros(len(packed.trained), device=where)
        step.loss_inputs(packed, (zeros, zeros))

    return 1e3 * statistics.median(timed(prepare) for _ in range(50))


def timed(function: Callable[[], None]) -> float:
    start = time.perf_counter()
    function()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--family", choices=sorted(FAMILIES), default="dense")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--micro-batch-tokens", type=int, default=4096)
    parser.add_argument("--micro-batches", type=int, default=1, help="micro-batches of a step")
    parser.add_argument("--trained", type=float, default=0.5, help="share of positions with a loss")
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    with tempfile.TemporaryDirectory() as folder:
        config = make_config(folder, args.family, args.micro_batch_tokens, args.threads)
        policy = MegatronPolicy(config, init="random")
        micro_batch = make_micro_batch(args.micro_batch_tokens, args.trained)
        width = sum(map(len, micro_batch))
        contenders = {
            "ours": partial(our_step, policy, micro_batch, args.micro_batches),
            "bare": bare_step(config, args.family, pack_micro_batch(micro_batch, width), args.micro_batches),
        }
        times: dict[str, list[float]] = {name: [] for name in contenders}
        for repeat in range(args.steps + 3):
            for name in sorted(contenders, reverse=repeat % 2 == 0):
                seconds = timed(contenders[name])
                if repeat >= 3:
                    times[name].append(seconds)
        medians = {name: statistics.median(values) for name, values in times.items()}
        report = {
            "benchmark": "train_step",
            "ratio": round(statistics.median(a / b for a, b in zip(times["ours"], times["bare"], strict=True)), 4),
            "ratio_fastest": round(min(times["ours"]) / min(times["bare"]), 4),
            "family": args.family,
            "tokens_per_s": round(width * args.micro_batches / medians["ours"]),
            "step_ms": round(1e3 * medians["ours"], 2),
            "bare_step_ms": round(1e3 * medians["bare"], 2),
            "host_ms_per_micro_batch": round(host_ms(policy, micro_batch), 3),
            "trained": args.trained,
            "micro_batches": args.micro_batches,
            "micro_batch_tokens": width,
            "parameters": sum(p.numel() for p in policy.model_chunks[0].parameters()),
            "threads": args.threads,
            "dtype": config.model.dtype,
            **stamp(__file__),
        }
        print(json.dumps(report))
        policy.close()


if __name__ == "__main__":
    main()

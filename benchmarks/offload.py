"""Moving a trainer's state to host memory and back, against plain copies of as many bytes. Prints one line of JSON.

``ratio`` is the time of `TrainState` for everything, both ways, ÷ that of one copy of the same bytes each way between a
device buffer and a host buffer that exist already. On a CPU the device is ordinary memory, freed and taken anew.

    python benchmarks/offload.py [--layers 4] [--hidden 512] [--repeats 7]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from measured import stamp

from megatron_fleet.config.schema import Config
from megatron_fleet.platform.device import device
from megatron_fleet.trainer.megatron.offload import PARTS
from megatron_fleet.trainer.megatron.policy import MegatronPolicy


def make_config(folder: str, layers: int, hidden: int, vocab: int) -> Config:
    hf_config = {
        "model_type": "qwen3",
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": hidden // 64,
        "head_dim": 64,
        "num_hidden_layers": layers,
        "rms_norm_eps": 1e-6,
        "vocab_size": vocab,
        "rope_theta": 1e6,
        "tie_word_embeddings": False,
    }
    (Path(folder) / "config.json").write_text(json.dumps(hf_config))
    tree = {
        "run": {"name": "benchmark", "out": folder, "steps": 1},
        "model": {"path": folder, "dtype": "bfloat16"},
        "policy": {"micro_batch_tokens": 128, "optimizer": {"lr": 1e-4}},
        "rollout": {
            "prompts_per_step": 2,
            "samples_per_prompt": 2,
            "max_context": 128,
            "sampling": {"max_tokens_per_turn": 64, "max_turns": 8},
        },
        "data": {"tasks": "embedded"},
    }
    return Config.model_validate(tree)


def timed(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--vocab", type=int, default=16384)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    with tempfile.TemporaryDirectory() as folder:
        policy = MegatronPolicy(make_config(folder, args.layers, args.hidden, args.vocab), init="random")
        state = policy.train_state()
        sizes = state.sizes()
        moved = sizes["parameters"] + sizes["optimizer"]  # gradients are dropped
        there = torch.empty(moved, dtype=torch.uint8, device=device())
        here = torch.empty(moved, dtype=torch.uint8, pin_memory=torch.cuda.is_available())

        def both_ways() -> tuple[float, float, float]:
            out, back = timed(lambda: state.offload(PARTS)), timed(lambda: state.onload(PARTS))
            return out, back, timed(lambda: here.copy_(there)) + timed(lambda: there.copy_(here))

        both_ways()  # makes the host buffers
        rows = [both_ways() for _ in range(args.repeats)]
        out, back, plain = (statistics.median(column) for column in zip(*rows, strict=True))
        report = {
            "benchmark": "offload",
            "ratio": round((out + back) / plain, 3),
            "offload_ms": round(1e3 * out, 2),
            "onload_ms": round(1e3 * back, 2),
            "gb_per_s": round(2 * moved / (out + back) / 1e9, 2),
            "plain_gb_per_s": round(2 * moved / plain / 1e9, 2),
            "bytes": sizes,
            **stamp(__file__),
        }
        print(json.dumps(report))
        policy.close()


if __name__ == "__main__":
    main()

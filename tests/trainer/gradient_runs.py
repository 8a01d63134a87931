"""Two measured updates of a tiny policy, in any layout; as a script, one rank of test_gradient_layouts.

Arguments: the folder of the test; results go to ``<rank>.pt`` in it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from policy_fixtures import make_batch, make_config, write_config
from rank_groups import leave_groups

from megatron_fleet.algorithms.losses import make_loss
from megatron_fleet.config.schema import AlgorithmConfig, Config, ParallelConfig
from megatron_fleet.trainer.gradient_metrics import SampledMatrix, Sums
from megatron_fleet.trainer.megatron import gradients, parallel
from megatron_fleet.trainer.megatron.policy import MegatronPolicy

SPARSE = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4, "norm_topk_prob": True}
SPARSE |= {"num_experts_per_tok": 2, "moe_intermediate_size": 80, "intermediate_size": 96}
MODELS: dict[str, dict[str, Any]] = {"dense": {}, "sparse": SPARSE}
"""Models of random weights; adapters stand beside stored ones."""
LAYOUTS: dict[str, dict[str, int]] = {
    "single": {},
    "tp2": {"tensor": 2},
    "pp2": {"pipeline": 2},
    "vpp2": {"pipeline": 2, "virtual": 2},
    "dp2": {"data": 2},
    "cp2": {"context": 2},
    "ep2": {"data": 2, "expert": 2},
}
RUNS = [("dense", "tp2"), ("dense", "vpp2"), ("dense", "dp2"), ("dense", "cp2")]
RUNS += [("sparse", "tp2"), ("sparse", "pp2"), ("sparse", "ep2"), ("adapters", "tp2")]


def micro_batches_of(data_rank: int, data_ranks: int) -> list[list[Any]]:
    """Four micro-batches and an empty one; of two data ranks, each has two and an empty one."""
    batch = make_batch(count=10, longest=50)
    micro_batches = [[*batch[:3]], [*batch[3:5]], [*batch[5:8]], [*batch[8:]]]
    return [*micro_batches, []] if data_ranks == 1 else [[*micro_batches[:2], []], [*micro_batches[2:], []]][data_rank]


def configure(folder: Path, model: str, layout: str) -> Config:
    stored = folder if (folder / "config.json").exists() else write_config(folder, **MODELS[model])
    tree = make_config(stored, ParallelConfig(**LAYOUTS[layout])).model_dump()
    tree["policy"]["gradient_metrics"] = {"every": 1, "parameters": 9}
    tree["policy"]["lora"]["rank"] = 4 if model == "adapters" else 0
    return Config.model_validate(tree)


def measure(policy: MegatronPolicy, micro_batches: list[list[Any]], loss: Any = None) -> tuple[dict[str, float], Any]:
    """An update's metrics, and what they were made of: matrix → its sums."""
    seen: list[list[Sums]] = []
    plain = gradients.gradient_metrics

    def look(samples: list[Sums]) -> dict[str, float]:
        seen.append(samples)
        return plain(samples)

    gradients.gradient_metrics = look  # type: ignore[assignment]
    try:
        policy.forward_backward(micro_batches, loss or make_loss(AlgorithmConfig()))
        report = policy.optim_step(1e-3)
    finally:
        gradients.gradient_metrics = plain
    samples: list[SampledMatrix] = policy._probe._samples  # type: ignore[union-attr]
    return report.gradient, dict(zip(samples, seen[0], strict=True)) if seen else {}


def run(folder: Path, model: str, layout: str, micro_batches: list[list[Any]] | None = None) -> list[Any]:
    """Two updates; adapters begin at zero, and so do half of their gradients."""
    policy = MegatronPolicy(configure(folder / model, model, layout), init="hf" if model == "adapters" else "random")
    micro_batches = micro_batches or micro_batches_of(policy.dp_rank, policy.dp_size)
    found = [measure(policy, micro_batches) for _ in range(2)]
    policy.close()
    return found


def main() -> None:
    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    # Stay joined: to meet again at the same address takes long.
    parallel.shutdown = leave_groups
    torch.save({(model, layout): run(folder, model, layout) for model, layout in RUNS}, folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

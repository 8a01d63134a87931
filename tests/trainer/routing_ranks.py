"""One rank of test_routing_layouts: one step with replayed routing, of models in layouts of its world size.

Arguments: the folder of the models, and JSON of pairs of a model and its layout. Results go to
``<model> <layout>.<rank>.pt`` in the folder.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rank_groups import leave_groups
from routing_models import LR, MICRO_BATCHES, MODELS, config, loss, record_anything, sequences

from megatron_fleet.trainer.megatron.policy import MegatronPolicy

LAYOUTS: dict[str, tuple[int, dict[str, int], Any]] = {
    "tp2": (2, {"tensor": 2}, "none"),
    "pp2": (2, {"pipeline": 2}, ["moe"]),
    "pp2 full": (2, {"pipeline": 2}, "full"),
    "pp2 some": (2, {"pipeline": 2}, 1),
    "vpp2": (2, {"pipeline": 2, "virtual": 2}, ["moe"]),
    "cp2": (2, {"context": 2}, "none"),
    "ep2": (2, {"data": 2, "expert": 2}, "none"),
    "cp2 vpp2": (4, {"context": 2, "pipeline": 2, "virtual": 2}, "full"),
    "ep2 etp2 tp2": (4, {"tensor": 2, "data": 2, "expert": 2, "expert_tensor": 2}, ["moe"]),
}
"""Layout → processes, keys of ``parallel``, ``policy.recompute``."""


def train(model: Path, parallel: dict[str, int], recompute: Any) -> dict[str, Any]:
    """One step; the biases of DeepSeek's routers move with it."""
    rate = 0.01 if model.name == "deepseek_v3" else 0.0
    policy = MegatronPolicy(config(model, parallel, recompute, bias_update_rate=rate))
    data = sequences()
    record_anything(data, MODELS[model.name])
    indices = MICRO_BATCHES[policy.dp_rank :: policy.dp_size]
    micro_batches = [[data[i] for i in micro_batch] for micro_batch in indices]
    values = policy.forward(micro_batches)
    report = policy.forward_backward(micro_batches, loss)
    return {
        "logprobs": {
            i: x for micro_batch, xs in zip(indices, values, strict=True) for i, x in zip(micro_batch, xs, strict=True)
        },
        "loss": report.loss,
        "counts": {name: value for name, value in report.metrics.items() if name.startswith("routing_")},
        "norm": policy.optim_step(LR).grad_norm,
        "parameters": {name: tensor.clone() for name, tensor in policy.weight_source()},
    }


def main(folder: Path, cases: list[list[str]]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for model, name in cases:
        world, parallel, recompute = LAYOUTS[name]
        if world == int(os.environ["WORLD_SIZE"]):
            torch.save(train(folder / model, parallel, recompute), folder / f"{model} {name}.{dist.get_rank()}.pt")
            leave_groups()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))

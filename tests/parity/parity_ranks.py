"""One rank of the parity runs: the wanted models in the layouts of its world size.

Arguments: the folder of the runs, and the number of optimizer steps.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from parity_layouts import CELLS_FILE, LAYOUTS, LR, MICRO_BATCHES, MODELS, Layout, batch, config, loss
from rank_groups import leave_groups

from megatron_fleet.trainer.megatron.policy import MegatronPolicy


def micro_batches_of(layout: Layout, policy: MegatronPolicy) -> list[list[int]]:
    """Fixed micro-batches, dealt out to the data-parallel ranks."""
    return MICRO_BATCHES[layout.sequences][policy.dp_rank :: policy.dp_size]


def train(layout: Layout, model: Path, steps: int) -> dict[str, Any]:
    policy = MegatronPolicy(config(model, layout))
    data = batch()
    indices = micro_batches_of(layout, policy)
    micro_batches = [[data[i] for i in micro_batch] for micro_batch in indices]
    out: dict[str, Any] = {"micro_batches": indices, "first": policy.forward(micro_batches), "losses": [], "norms": []}
    for _ in range(steps):
        out["losses"].append(policy.forward_backward(micro_batches, loss).loss)
        out["norms"].append(policy.optim_step(LR).grad_norm)
    # The live export names parameters as the model's folder does, whatever the layout.
    out["parameters"] = {name: tensor.clone() for name, tensor in policy.weight_source()}
    return out


def main(folder: Path, steps: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    world = int(os.environ["WORLD_SIZE"])
    wanted = {tuple(cell) for cell in json.loads((folder / CELLS_FILE).read_text())}
    for layout in [x for x in LAYOUTS if x.world == world]:
        for model in [name for name in layout.models if (name, layout.name) in wanted]:
            began = time.monotonic()
            result = train(layout, folder / model, steps)
            torch.save(result, folder / f"{model} {layout.name}.{dist.get_rank()}.pt")
            leave_groups()
            if dist.get_rank() == 0:
                print(f"{MODELS[model]}, {layout.name}: {time.monotonic() - began:.1f} s", flush=True)
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))

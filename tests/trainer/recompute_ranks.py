"""Gradients with none, some and all layers recomputed, in any layout; as a script, one rank of test_recompute.

Argument: the folder of the test; results go to ``<rank>.pt`` in it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from families_gradient_ranks import gradients
from policy_fixtures import make_batch, make_config
from rank_groups import leave_groups

from megatron_fleet.config.schema import Config, ParallelConfig
from megatron_fleet.trainer.megatron import parallel
from megatron_fleet.trainer.megatron.policy import MegatronPolicy

LAYOUTS: dict[str, dict[str, int]] = {
    "pp2 uneven": {"pipeline": 2, "first_stage_layers": 2},
    "vpp2": {"pipeline": 2, "virtual": 2},
}
"""Layouts of eight layers: 2 and 6 on a stage, and 2 in each chunk."""
RECOMPUTE: dict[str, tuple[Any, ...]] = {"pp2 uneven": ("none", 4, "full"), "vpp2": ("none", 1, "full")}
"""Layout → values of ``policy.recompute``."""
MICRO_BATCHES = 4


def run(folder: Path, layout: dict[str, int], recompute: Any) -> tuple[dict[str, torch.Tensor], list[list[float]]]:
    """Gradients of the whole model, and how often each layer of each chunk computed forward in a micro-batch."""
    tree = make_config(folder, ParallelConfig(**layout)).model_dump()
    tree["policy"]["recompute"] = recompute
    policy = MegatronPolicy(Config.model_validate(tree), init="random")
    calls = [[0] * len(chunk.decoder.layers) for chunk in policy.model_chunks]
    for counts, chunk in zip(calls, policy.model_chunks, strict=True):
        for place, layer in enumerate(chunk.decoder.layers):

            def count(*_: Any, counts: list[int] = counts, place: int = place) -> None:
                counts[place] += 1

            layer.register_forward_hook(count)
    batch = make_batch(2 * MICRO_BATCHES)
    found = gradients(policy, [batch[2 * n : 2 * n + 2] for n in range(MICRO_BATCHES)])
    policy.close()
    return found, [[count / MICRO_BATCHES for count in counts] for counts in calls]


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    # Stay joined: to meet again at the same address takes long.
    parallel.shutdown = leave_groups
    found = {(name, some): run(folder, LAYOUTS[name], some) for name in LAYOUTS for some in RECOMPUTE[name]}
    torch.save(found, folder / f"{os.environ['RANK']}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

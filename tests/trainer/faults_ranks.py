"""One rank of test_faults: names what is not finite in the last layer of the last rank.

Arguments: the folder of the test; results go to ``<rank>.pt`` in it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from policy_fixtures import make_config, write_config
from rank_groups import leave_groups

from megatron_fleet.config.schema import ParallelConfig
from megatron_fleet.trainer.megatron.faults import Faults, find_faults
from megatron_fleet.trainer.megatron.policy import MegatronPolicy

SPARSE = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4, "norm_topk_prob": True}
SPARSE |= {"num_experts_per_tok": 2, "moe_intermediate_size": 48}


def name_faults(folder: Path, parallel: ParallelConfig, **hf: Any) -> Faults:
    """The last rank's last layer gets a bad weight and a bad gradient."""
    policy = MegatronPolicy(make_config(write_config(folder, **hf), parallel), init="random")
    named = [(n, p) for n, p in policy.model_chunks[-1].named_parameters() if "decoder.layers" in n and "mlp." in n]
    if dist.get_rank() == 1:
        with torch.no_grad():
            named[-1][1][0, 0] = float("inf")
            named[0][1].main_grad.view(-1)[0] = float("nan")
    return find_faults(policy.model_chunks)


def main() -> None:
    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    results = {"pipeline": name_faults(folder / "dense", ParallelConfig(pipeline=2, virtual=2))}
    leave_groups()
    results["experts"] = name_faults(folder / "sparse", ParallelConfig(data=2, expert=2), **SPARSE)
    torch.save(results, folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

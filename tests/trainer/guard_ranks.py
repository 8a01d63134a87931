"""One rank of test_guard_layouts: guarded steps in one layout, then replays of their dumps in others.

Arguments: the folder of the test; results go to ``<rank>.pt`` in it.
"""

from __future__ import annotations

import io
import json
import os
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from policy_fixtures import make_batch, make_config, write_config
from rank_groups import leave_groups

from megatron_fleet.algorithms.losses import make_loss
from megatron_fleet.config.schema import Config, Parallel
from megatron_fleet.debug import replay
from megatron_fleet.loop.guard import StepGuard, Update
from megatron_fleet.loop.safety import FEWEST
from megatron_fleet.platform.communicator import TorchCommunicator
from megatron_fleet.trainer.megatron import parallel
from megatron_fleet.trainer.megatron.faults import Faults, find_faults
from megatron_fleet.trainer.megatron.policy import MegatronPolicy
from megatron_fleet.trainer.row_losses import RowLosses

LAYOUTS = {
    "dp2": {"data": 2},
    "pp2": {"pipeline": 2},
    "tp2": {"tensor": 2},
    "vpp2": {"pipeline": 2, "virtual": 2},
    "ep2": {"data": 2, "expert": 2},
}
SPARSE = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4, "norm_topk_prob": True}
SPARSE |= {"num_experts_per_tok": 2, "moe_intermediate_size": 48}


def rows_of(data_rank: int, data_ranks: int, bad: bool) -> list[list[Any]]:
    """Three rows for each of two halves of a batch; a bad one has a NaN in the last sequence of the second half."""
    batch = make_batch(count=10, longest=60)
    if bad:
        batch[-1].weights[-1] = np.nan
    rows = [[*batch[i : i + 2]] for i in range(0, 10, 2)] + [[]]
    return rows if data_ranks == 1 else [rows[:3], [rows[3], [], rows[4]]][data_rank]


def train(folder: Path, layout: str) -> dict[str, Any]:
    """A good step, one that is not finite on the last data rank alone, a good one, a spike."""
    tree = make_config(write_config(folder / "model"), Parallel(**LAYOUTS[layout])).model_dump()
    tree["run"]["out"] = str(folder / layout)
    config = Config.model_validate(tree)
    policy = MegatronPolicy(config, init="random")
    guard = StepGuard(config, policy, TorchCommunicator())
    loss = make_loss(config.algorithm)
    reports = []
    for step, bad in enumerate([False, True, False, False], 1):
        if step == 4:
            guard.load(guard.state() | {"norms": [1e-3] * FEWEST})
        rows = rows_of(policy.dp_rank, policy.dp_size, bad)
        losses = RowLosses(loss)
        report = policy.forward_backward(rows, losses)
        reports.append(guard.optim_step(Update(step, 0, 1e-3, rows, losses, report)))
    weights = [p.detach().clone() for chunk in policy.model_chunks for p in chunk.parameters()]
    policy.close()
    return {"reports": reports, "state": guard.state(), "weights": weights}


def name_faults(folder: Path, layout: str, **hf: Any) -> Faults:
    """The last rank's last layer gets a bad weight and a bad gradient."""
    policy = MegatronPolicy(make_config(write_config(folder, **hf), Parallel(**LAYOUTS[layout])), init="random")
    named = [(n, p) for n, p in policy.model_chunks[-1].named_parameters() if "decoder.layers" in n and "mlp." in n]
    if dist.get_rank() == 1:
        with torch.no_grad():
            named[-1][1][0, 0] = float("inf")
            named[0][1].main_grad.view(-1)[0] = float("nan")
    faults = find_faults(policy.model_chunks)
    policy.close()
    return faults


def main() -> None:
    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    # Stay joined: to meet again at the same address takes long.
    parallel.shutdown = leave_groups
    results: dict[str, Any] = {layout: train(folder, layout) for layout in ("dp2", "pp2")}
    results["vpp2"] = name_faults(folder / "dense", "vpp2")
    results["ep2"] = name_faults(folder / "sparse", "ep2", **SPARSE)
    for dump, target in (("dp2", "dp2"), ("dp2", "tp2"), ("pp2", "pp2"), ("pp2", "dp2")):
        sizes = {"data": 1, "pipeline": 1, "tensor": 1} | LAYOUTS[target]
        for step in (2, 4):
            where = folder / dump / "dumps" / f"step-00000{step}.0"
            with redirect_stdout(io.StringIO()) as printed:
                status = replay.main(where, [f"parallel.{name}={size}" for name, size in sizes.items()], True)
            found = json.loads(printed.getvalue()) if rank == 0 else None
            results[f"{dump}-{step}-{target}"] = {"status": status, "found": found}
    torch.save(results, folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

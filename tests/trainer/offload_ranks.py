"""One rank of test_offload_ranks: trains with and without taking turns, in the layouts of its world.

Arguments: the folder of the test, which holds ``model``; results go to ``<layout>.<rank>.pt``.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from policy_fixtures import make_batch, make_config
from rank_groups import leave_groups

from megatron_fleet.algorithms.losses import make_loss
from megatron_fleet.config.schema import Algorithm, Parallel
from megatron_fleet.loop.colocation import Devices, EnginesApart, limits
from megatron_fleet.loop.memory_budget import Ledger, open_gauge
from megatron_fleet.platform.communicator import TorchCommunicator
from megatron_fleet.trainer.megatron.policy import MegatronPolicy

LAYOUTS = {"data2": {"data": 2}, "tensor2": {"tensor": 2}, "pipeline2": {"pipeline": 2}}


def train(policy: MegatronPolicy, devices: Devices | None) -> list[Any]:
    """Three steps; with ``devices`` the trainer leaves after each and comes back."""
    batch, loss, reports = make_batch(count=4, longest=40), make_loss(Algorithm()), []
    rows = [batch[policy.dp_rank :: policy.dp_size]]
    for _ in range(3):
        reports.append((policy.forward_backward(rows, loss), policy.optim_step(1e-3)))
        if devices is not None:
            devices.to_engines(partial(policy.forward, rows))
            devices.to_trainer()
    return reports


def run(folder: Path, parallel: Parallel) -> dict[str, Any]:
    config = make_config(folder / "model", parallel, dtype="bfloat16")
    straight = MegatronPolicy(config, init="random")
    expected = train(straight, None), list(straight.model_chunks[0].parameters())
    leave_groups()
    policy, comm = MegatronPolicy(config, init="random"), TorchCommunicator()
    state = policy.train_state()
    ledger = Ledger(comm, open_gauge(torch.device("cpu")), limits(state.sizes(), 1), folder / "memory.json")
    reports = train(policy, Devices(state, EnginesApart(), ledger, comm))
    parameters = list(policy.model_chunks[0].parameters())
    return {
        "sizes": state.sizes(),
        "metrics": ledger.metrics(),
        "same_reports": reports == expected[0],
        "same_parameters": all(torch.equal(a, b) for a, b in zip(parameters, expected[1], strict=True)),
    }


def main() -> None:
    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for name, layout in LAYOUTS.items():
        torch.save(run(folder, Parallel(**layout)), folder / f"{name}.{rank}.pt")
        leave_groups()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

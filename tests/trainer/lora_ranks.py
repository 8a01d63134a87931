"""One rank of test_lora: trains adapters or INT4 experts in its world's jobs, one after the other, and writes what it
measured.

Arguments: the folder of the test, which holds ``jobs.<world>.pt``; results go to ``<job>.<rank>.pt``.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from policy_fixtures import make_batch, make_config
from rank_groups import leave_groups

from megatron_fleet.algorithms.losses import LossInputs
from megatron_fleet.config.schema import Config, LoraConfig, ParallelConfig
from megatron_fleet.platform.communicator import TorchCommunicator
from megatron_fleet.trainer.megatron.policy import MegatronPolicy
from megatron_fleet.weights.adapters import export_adapters

LORA = LoraConfig(rank=3, alpha=6.0, targets=("attention", "mlp"))
WITH_EXPERTS = LoraConfig(rank=3, alpha=6.0, targets=("attention", "mlp", "experts"))
LR, STEPS = 3e-3, 3


def config_of(job: dict[str, Any], folder: Path) -> Config:
    config = make_config(folder / job["model"], ParallelConfig(**job["parallel"]), eps=1e-4)
    policy = {
        "lora": job["lora"],
        "recompute": job.get("recompute", "none"),
        "fake_quant": job.get("fake_quant", "none"),
    }
    return config.model_copy(update={"policy": config.policy.model_copy(update=policy)})


def loss(x: LossInputs) -> Any:
    """Policy gradient with an entropy bonus."""
    total = -(x.scaled_advantages * x.logprobs).sum() - 0.01 * (x.loss_scale * x.entropy).sum()
    return total, {"tokens": x.loss_scale.new_tensor(float(len(x.loss_scale)))}


def frozen(policy: MegatronPolicy) -> list[torch.Tensor]:
    return [p.detach().clone() for chunk in policy.model_chunks for p in chunk.parameters() if not p.requires_grad]


def run(job: dict[str, Any], folder: Path) -> dict[str, Any]:
    policy = MegatronPolicy(config_of(job, folder))
    batch = make_batch(count=8, vocab_size=500, longest=30)
    indices = [[0, 7], [1, 6], [2, 5], [3, 4]][policy.dp_rank :: policy.dp_size]
    micro_batches = [[batch[i] for i in micro_batch] for micro_batch in indices]
    out: dict[str, Any] = {"rank_micro_batches": indices, "losses": [], "norms": []}
    base = frozen(policy)
    if "load" in job:
        policy.load_state(folder / job["load"])
        out["loaded"] = dict(policy.adapter_source())
    else:
        policy.keep_reference()
        out["initial"] = dict(policy.adapter_source())
        out["first"] = policy.forward(micro_batches)
    for step in range(job.get("first_step", 0), STEPS):
        if step == job.get("save_at"):
            policy.save_state(folder / job["save"])
            out["saved"] = dict(policy.adapter_source())
        out["losses"].append(policy.forward_backward(micro_batches, loss).loss)
        out["norms"].append(policy.optim_step(LR).grad_norm)
    out["adapters"] = dict(policy.adapter_source())
    if "load" in job:
        return out
    out["merged"] = dict(policy.weight_source())
    out["last"] = policy.forward(micro_batches)
    out["reference"] = policy.forward(micro_batches, "reference")
    out["after_reference"] = policy.forward(micro_batches)
    out["base_untouched"] = all(torch.equal(a, b) for a, b in zip(base, frozen(policy), strict=True))
    wrapped = [buffer for w in policy._wrapped for buffer in (*w.buffers, *w.expert_parallel_buffers)]
    out["buffered"] = sum(p.numel() for buffer in wrapped for p in buffer.params)
    out["trained"] = sum(p.numel() for chunk in policy.model_chunks for p in chunk.parameters() if p.requires_grad)
    if "export" in job:
        how = {"base": str(folder / job["model"]), "rank": LORA.rank, "alpha": LORA.alpha, "world": TorchCommunicator()}
        export_adapters(policy.adapter_source(), folder / job["export"], **how)
        policy.export_hf(folder / f"{job['export']}-merged")
    return out


def main() -> None:
    folder, world, rank = Path(sys.argv[1]), int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for job in torch.load(folder / f"jobs.{world}.pt", weights_only=False):
        torch.save(run(job, folder), folder / f"{job['name']}.{rank}.pt")
        leave_groups()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""One rank of test_layouts: runs its world's jobs one after the other and writes what they measured.

Arguments: the folder of the test, which holds ``jobs.<world>.pt``; results go to ``<job>.<rank>.pt``.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from policy_fixtures import MICRO_BATCH_TOKENS, make_batch, make_config
from rank_groups import leave_groups

from megatron_fleet.algorithms.losses import make_loss
from megatron_fleet.config.schema import AlgorithmConfig, CorrectionConfig, ParallelConfig, PrecisionConfig
from megatron_fleet.loop.update import with_logprobs
from megatron_fleet.models.layout import micro_batch_alignment, sequence_alignment
from megatron_fleet.trainer.base import LossReport
from megatron_fleet.trainer.megatron.build import parameter_shards
from megatron_fleet.trainer.megatron.optimizer_shards import boxes
from megatron_fleet.trainer.megatron.policy import MegatronPolicy
from megatron_fleet.trainer.megatron.state import describe
from megatron_fleet.trainer.packing.pack_plan import plan_micro_batches

LOSSES = {
    # What looks at whole sequences, which context parallelism spreads over ranks.
    "dense": AlgorithmConfig(loss="gspo", correction=CorrectionConfig(kind="sequence_tis"), entropy_coef=0.01),
    "tied": AlgorithmConfig(),
    "sparse": AlgorithmConfig(loss="cispo", correction=CorrectionConfig(kind="icepop")),
    "hybrid": AlgorithmConfig(),
}


def dump(policy: MegatronPolicy) -> list[tuple[Any, ...]]:
    """Every local parameter with its place in the whole model."""
    return [
        (s.key, tuple(s.global_shape), tuple(s.global_offset), s.prepend_axis_num, s.data.detach().clone())
        for s in parameter_shards(policy.model_chunks)
    ]


def dump_optimizer(policy: MegatronPolicy) -> list[tuple[Any, ...]]:
    """Main parameters and moments that this rank holds, with their places in the whole ones."""
    described = [describe(chunk) for chunk in policy.model_chunks]
    return [
        (box.key, tuple(box.shape), tuple(box.offsets), 0, box.data.detach().clone())
        for box in boxes(policy._optimizer, described)
        if box.is_main
    ]


def run(job: dict[str, Any], folder: Path) -> dict[str, Any]:
    parallel = ParallelConfig(**job["parallel"])
    policy = MegatronPolicy(make_config(folder / job["model"], parallel), init="random")
    batch = make_batch()
    lengths = [len(d) for d in batch]
    aligns = sequence_alignment(parallel), micro_batch_alignment(parallel, PrecisionConfig())
    plan = plan_micro_batches(lengths, policy.dp_size, MICRO_BATCH_TOKENS, lengths, *aligns)[policy.dp_rank]
    micro_batches = [[batch[i] for i in micro_batch] for micro_batch in plan]
    loss = make_loss(LOSSES[job["model"]])
    out: dict[str, Any] = {"rank_micro_batches": plan, "reports": []}
    if "load" in job:
        policy.load_state(folder / job["load"])
        out["loaded"] = dump(policy)
        out["loaded_optimizer"] = dump_optimizer(policy)
    else:
        out["initial_logprobs"] = policy.forward(micro_batches)
        policy.keep_reference()
    for step in range(job["first"], job["last"]):
        if step == job.get("save_at"):
            policy.save_state(folder / job["save"])
            out["saved"] = dump(policy)
            out["saved_optimizer"] = dump_optimizer(policy)
        report = policy.forward_backward(micro_batches, loss)
        out["reports"].append((report, policy.optim_step(1e-3)))
    out["parameters"] = dump(policy)
    if "load" not in job:
        out["final_logprobs"] = policy.forward(micro_batches)
        out["reference_logprobs"] = policy.forward(micro_batches, "reference")
        out["after_reference"] = dump(policy)
        _poison(policy, micro_batches, out)
        out["old_policy"] = _old_policy(policy, micro_batches)
    out["imported_compiler"] = "torch._dynamo" in sys.modules
    return out


def _poison(policy: MegatronPolicy, micro_batches: list[list[Any]], out: dict[str, Any]) -> None:
    """One rank's loss becomes NaN: every rank must skip the update, and the next one must be clean."""

    def bad(x: Any) -> Any:
        return x.logprobs.sum() * (float("nan") if policy.dp_rank == 0 else 1.0), {}

    policy.forward_backward(micro_batches, bad)
    out["poisoned"] = policy.optim_step(1e-3)
    out["after_poison"] = dump(policy)
    policy.forward_backward(micro_batches, make_loss(AlgorithmConfig()))
    out["after_poison_step"] = policy.optim_step(1e-3)


def _old_policy(policy: MegatronPolicy, micro_batches: list[list[Any]]) -> LossReport:
    """Several updates per batch: π_old from a pass of its own, against what the first update computes itself."""
    values = policy.forward(micro_batches)
    old = [
        with_logprobs(micro_batch, "proximal", found) for micro_batch, found in zip(micro_batches, values, strict=True)
    ]
    return policy.forward_backward(old, make_loss(AlgorithmConfig()))


def main() -> None:
    folder, world, rank = Path(sys.argv[1]), int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    torch.set_num_threads(1)
    np.seterr(all="raise")
    dist.init_process_group("gloo")
    for job in torch.load(folder / f"jobs.{world}.pt", weights_only=False):
        torch.save(run(job, folder), folder / f"{job['name']}.{rank}.pt")
        leave_groups()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

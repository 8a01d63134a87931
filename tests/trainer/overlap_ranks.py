"""One rank of test_gradient_overlap: updates with and without overlap, in every layout of two ranks.

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
from test_layouts import SPARSE, write_hybrid

from megatron_fleet.algorithms.losses import make_loss
from megatron_fleet.config.schema import AlgorithmConfig, Config, ParallelConfig
from megatron_fleet.trainer.megatron import policy as policy_module
from megatron_fleet.trainer.megatron.build import parameter_shards
from megatron_fleet.trainer.megatron.gradient_overlap import GradientOverlap, overlap_arguments
from megatron_fleet.trainer.megatron.policy import MegatronPolicy

BUCKET = 5000
"""Parameters; Megatron's own size would put these models into one bucket."""
STARTED: list[list[bool]] = []
"""For each end of a pass, whether each part's reduction had started."""
RUNS: dict[str, tuple[str, dict[str, int], dict[str, Any]]] = {
    "dp2": ("dense", {"data": 2}, {}),
    "cp2": ("dense", {"context": 2}, {}),
    "tied": ("tied", {"data": 2}, {}),
    "bfloat16": ("dense", {"data": 2}, {"precision": {"gradients": "bfloat16"}, "model": {"dtype": "bfloat16"}}),
    "recomputed": ("dense", {"data": 2}, {"policy": {"recompute": "full"}}),
    "adapters": ("stored", {"data": 2}, {"policy": {"lora": {"rank": 4}}}),
    "ep2": ("sparse", {"data": 2, "expert": 2}, {}),
    "hybrid": ("hybrid", {"data": 2}, {}),
    "vpp2": ("tied", {"pipeline": 2, "virtual": 2}, {}),
}
"""Name → model, layout, changes of the configuration."""


def write_models(folder: Path) -> None:
    from tiny_models import make

    write_config(folder / "dense")
    write_config(folder / "tied", tie_word_embeddings=True)
    write_config(folder / "sparse", **SPARSE)
    write_hybrid(folder / "hybrid")
    make("qwen3", folder / "stored")


def configure(folder: Path, name: str, overlap: bool) -> Config:
    model, layout, changes = RUNS[name]
    tree = make_config(folder / model, ParallelConfig(**layout)).model_dump()
    for section, values in changes.items():
        tree[section] |= values
    tree["policy"]["overlap"] = overlap
    return Config.model_validate(tree)


def run(folder: Path, name: str, overlap: bool) -> dict[str, Any]:
    config = configure(folder, name, overlap)
    policy = MegatronPolicy(config, init="hf" if name == "adapters" else "random")
    batch = make_batch(vocab_size=policy.vocab_size)
    shares = [[[*batch[:2]], [*batch[2:4]]], [[*batch[4:7]], []]]
    if policy.dp_size == 1:
        shares = [shares[0] + shares[1]]
    first = shares[policy.dp_rank]
    second = first[:1] * len(first)
    loss, out = make_loss(AlgorithmConfig()), {"reports": [], "ends_empty": not first[-1]}
    STARTED.clear()

    def take(*parts: Any) -> None:
        for micro_batches in parts:
            out["reports"].append(policy.forward_backward(micro_batches, loss))

    def step() -> None:
        out["reports"].append(policy.optim_step(1e-3))

    take(second, first)
    step()
    take(first)
    step()
    step()  # without gradients
    take(second)
    policy.discard_gradients()
    take(second, first, first)
    step()
    policy.save_state(folder / f"{name}.{overlap}")
    take(first)
    step()
    out["parameters"] = dump(policy)
    out["buckets"] = sum(len(buffer.buckets) for chunk in policy._wrapped for buffer in chunk.buffers)
    out["started"] = list(STARTED)
    policy.load_state(folder / f"{name}.False")
    take(first)
    step()
    out["resumed"] = dump(policy)
    return out


def dump(policy: MegatronPolicy) -> dict[str, torch.Tensor]:
    if policy._adapters:
        return {name: p.detach().clone() for name, p in policy.model_chunks[0].named_parameters() if p.requires_grad}
    found = enumerate(parameter_shards(policy.model_chunks))
    return {f"{i} {shard.key}": shard.data.detach().clone() for i, shard in found}


def main() -> None:
    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    end = GradientOverlap.end

    def in_small_buckets(policy: Any, cuda: bool) -> dict[str, Any]:
        found = overlap_arguments(policy, cuda)
        if policy.overlap and not found:  # stages alone: nothing to reduce, but all of the machinery
            found = {"overlap_grad_reduce": True}
        return found | {"bucket_size": BUCKET} if found else found

    def recorded(self: GradientOverlap) -> None:
        STARTED.append([group.grad_reduce_handle is not None for group in self._groups])
        end(self)

    policy_module.overlap_arguments, GradientOverlap.end = in_small_buckets, recorded  # type: ignore[method-assign]
    results = {}
    for name in sys.argv[2:] or RUNS:
        for overlap in (False, True):
            results[name, overlap] = run(folder, name, overlap)
            leave_groups()
    torch.save(results, folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""One rank of test_families_gradients: families in layouts of its world size, by HF names.

Files ``FAMILY LAYOUT.pt`` have the gradients of one step, and the parameters after several.

Arguments: the folder of the test, and JSON of pairs of a family and its layout.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from policy_fixtures import make_config
from rank_groups import leave_groups

from megatron_fleet.algorithms.datum import Datum
from megatron_fleet.algorithms.losses import LossInputs, LossResult
from megatron_fleet.config.schema import ParallelConfig
from megatron_fleet.trainer.megatron import optimizer
from megatron_fleet.trainer.megatron.policy import MegatronPolicy
from megatron_fleet.weights.exchange import OwnedBox
from megatron_fleet.weights.source import MegatronWeightSource

LAYOUTS: dict[str, dict[str, int]] = {
    "single": {},
    "TP2": {"tensor": 2},
    "PP2": {"pipeline": 2},
    "CP2": {"context": 2},
    "EP2": {"data": 2, "expert": 2},
    "TP2×PP2": {"tensor": 2, "pipeline": 2},
}
WORLDS = {"single": 1, "TP2×PP2": 4}
"""Ranks of a layout if not 2."""
TEMPERATURE, ENTROPY, STEPS, LR = 0.8, 0.01, 3, 1e-3


def batch() -> list[Datum]:
    """Two sequences, of which several tokens are trained."""
    rng = np.random.default_rng(3)
    data = []
    for n in (45, 70):
        mask = rng.random(n) < 0.5
        mask[0] = False
        weights = mask * rng.normal(size=n).astype(np.float32)
        zeros = np.zeros(n, np.float32)
        data.append(Datum(rng.integers(0, 511, n).astype(np.int32), mask, weights / np.float32(n), zeros, 1 / n))
    return data


def scales(datum: Datum) -> np.ndarray:
    """The normaliser of each token, float32 ``[T]``."""
    return (datum.loss_mask * datum.loss_scale).astype(np.float32)


def objective(logprobs: torch.Tensor, entropy: torch.Tensor, mask: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return -(weights * logprobs).sum() - ENTROPY * (mask * entropy).sum()


def loss(x: LossInputs) -> LossResult:
    return objective(x.logprobs, x.entropy, x.loss_scale, x.scaled_advantages), {}


def micro_batches_of(policy: MegatronPolicy) -> list[list[Datum]]:
    """Both sequences in one micro-batch; ranks that share the data have one each."""
    return [batch()] if policy.dp_size == 1 else [[batch()[policy.dp_rank]]]


def train(policy: MegatronPolicy) -> dict[str, torch.Tensor]:
    """Parameters of the whole model by HF names after `STEPS` steps."""
    for _ in range(STEPS):
        policy.forward_backward(micro_batches_of(policy), loss)
        policy.optim_step(LR)
    return {name: tensor.clone() for name, tensor in policy.weight_source()}


def gradients(policy: MegatronPolicy, micro_batches: list[list[Datum]] | None = None) -> dict[str, torch.Tensor]:
    """Gradients of the whole model by HF names; the parameters are lost."""
    policy.forward_backward(micro_batches or micro_batches_of(policy), loss)
    optimizer.reduce_gradients(policy._wrapped, policy._optimizer)
    for chunk in policy._wrapped:
        for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
            for bucket in group.buckets:
                # Each rank has reduced its own part.
                ranks = group.intra_distributed_optimizer_instance_group
                mine = bucket.grad_data.chunk(ranks.size())[ranks.rank()].clone()
                dist.all_gather_into_tensor(bucket.grad_data, mine, ranks)
        for parameter in chunk.parameters():
            parameter.data.copy_(parameter.main_grad)

    def values(source: MegatronWeightSource, owned: OwnedBox) -> torch.Tensor:
        """Without the offset of norms: gradients have none."""
        return source._local[owned.local].view()[slice(*owned.rows)]

    with mock.patch.object(MegatronWeightSource, "values", values):
        return {name: tensor.clone() for name, tensor in policy.weight_source()}


def main(folder: Path, cases: list[list[str]]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for family, layout in cases:
        if WORLDS.get(layout, 2) == dist.get_world_size():
            parallel = ParallelConfig(**LAYOUTS[layout])
            config = make_config(folder / family, parallel, temperature=TEMPERATURE, eps=1e-5)
            found = []
            for run in (gradients, train):
                found.append(run(MegatronPolicy(config)))
                leave_groups()
            if dist.get_rank() == 0:
                torch.save(found, folder / f"{family} {layout}.pt")
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))

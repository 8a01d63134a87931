"""Parameters that are not finite: all of them, by their names in the whole model, in the order of a backward pass."""

from __future__ import annotations

from pathlib import Path

import pytest
from rank_processes import run_ranks

pytest.importorskip("megatron_fleet.trainer.megatron")

import numpy as np
import torch
from policy_fixtures import make_batch, make_config, write_config

from megatron_fleet.algorithms.losses import make_loss
from megatron_fleet.config.schema import AlgorithmConfig
from megatron_fleet.trainer.megatron.faults import find_faults
from megatron_fleet.trainer.megatron.policy import MegatronPolicy

ALL = 35
"""Parameters of the tiny model: three outside of its four layers."""


def test_gradients_are_named_from_where_they_broke(tmp_path):
    """The loss is finite; from the second layer down to the input the backward pass is not."""
    policy = MegatronPolicy(make_config(write_config(tmp_path / "model")), init="random")

    def spoil(module, inputs, output):
        output[0].register_hook(lambda gradient: gradient * float("nan"))

    try:
        policy.model_chunks[0].decoder.layers[1].register_forward_hook(spoil)
        report = policy.forward_backward([make_batch(count=2, longest=60)], make_loss(AlgorithmConfig()))
        found = find_faults(policy.model_chunks)
    finally:
        policy.close()
    assert np.isfinite(report.loss)
    assert found.weights == []
    assert found.gradients[0].startswith("decoder.layers.1.mlp.linear_fc2")
    assert found.gradients[-1] == "embedding.word_embeddings.weight"
    assert not [name for name in found.gradients if name.startswith(("decoder.layers.2", "decoder.layers.3"))]
    assert len(found.gradients) == 2 * (ALL - 3) // 4 + 1
    assert found.parameters == ALL


@pytest.mark.slow
def test_parameters_have_their_names_in_the_whole_model(tmp_path):
    run_ranks(Path(__file__).with_name("faults_ranks.py"), 2, tmp_path)
    for rank in range(2):
        found = torch.load(tmp_path / f"{rank}.pt", weights_only=False)
        assert found["pipeline"].weights == ["decoder.layers.3.mlp.linear_fc2.weight"]
        assert found["pipeline"].gradients == ["decoder.layers.3.mlp.linear_fc1.weight"]
        assert found["pipeline"].parameters == ALL
        assert found["experts"].weights == ["decoder.layers.3.mlp.experts.local_experts.3.linear_fc2.weight"]
        assert found["experts"].gradients == ["decoder.layers.0.mlp.router.weight"]
        assert found["experts"].parameters == 3 + 4 * (7 + 2 * 4)

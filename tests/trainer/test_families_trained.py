"""Families in training: log-probs of packed rows are those of transformers, a step raises the objective."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("megatron_fleet.trainer.megatron")
pytest.importorskip("transformers")

import torch
from policy_fixtures import make_batch, make_config
from tiny_models import make, raw_config, reference_logits

from megatron_fleet.algorithms.losses import make_loss
from megatron_fleet.config.schema import Algorithm
from megatron_fleet.models.hf_config import read_model
from megatron_fleet.trainer.megatron.policy import MegatronPolicy

TRAINED = ("qwen2", "qwen2_tied", "qwen3", "qwen3_tied", "qwen3_yarn", "llama3")
TRAINED += (
    "qwen3_moe",
    "glm4_moe",
    "glm4_flash",
    "deepseek_v3",
    "deepseek_v3_fp8",
    "moonlight",
    "kimi_k2",
    "kimi_k2_thinking",
    "kimi_k25",
)


@pytest.mark.parametrize("family", TRAINED)
def test_a_family_is_trained_as_it_is(tmp_path, family):
    folder = make(family, tmp_path / family)
    vocab = read_model(raw_config(family, "v5")).vocab
    batch = make_batch(count=4, vocab_size=vocab)
    policy = MegatronPolicy(make_config(folder))
    try:
        got = [x for row in policy.forward([batch[:2], batch[2:]]) for x in row]
        for datum, logprobs in zip(batch, got, strict=True):
            ids = torch.from_numpy(datum.token_ids).long()[None]
            logp = (reference_logits(folder, ids)[0] / 0.8).log_softmax(-1)
            expected = np.zeros(len(datum))
            expected[1:] = logp[:-1].gather(1, ids[0, 1:, None])[:, 0]
            trained = datum.loss_mask
            assert np.abs(logprobs - expected)[trained].max() < 1e-4
        before = objective(batch, got)
        policy.forward_backward([batch[:2], batch[2:]], make_loss(Algorithm()))
        assert policy.optim_step(1e-3).grad_norm > 0
        assert objective(batch, [x for row in policy.forward([batch[:2], batch[2:]]) for x in row]) > before
    finally:
        policy.close()


def objective(batch, logprobs) -> float:
    """Σ weight · log-prob, what a step of policy gradient raises."""
    return sum(float(datum.scaled_advantages @ x) for datum, x in zip(batch, logprobs, strict=True))

"""Families in training: log-probs of packed micro-batches are those of transformers, a step raises the objective."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

pytest.importorskip("megatron_fleet.trainer.megatron")
pytest.importorskip("transformers")

import torch
from policy_fixtures import make_batch, make_config
from tiny_models import make, raw_config, reference_logits

from megatron_fleet.algorithms.losses import make_loss
from megatron_fleet.config.schema import AlgorithmConfig
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
    "qwen3_5_text",
    "qwen3_5_moe",
)


@pytest.mark.parametrize("family", TRAINED)
def test_a_family_is_trained_as_it_is(tmp_path, family):
    folder = make(family, tmp_path / family)
    vocab = read_model(raw_config(family, "v5")).vocab
    batch = make_batch(count=4, vocab_size=vocab)
    policy = MegatronPolicy(make_config(folder))
    try:
        got = [x for values in policy.forward([batch[:2], batch[2:]]) for x in values]
        for datum, logprobs in zip(batch, got, strict=True):
            ids = torch.from_numpy(datum.token_ids).long()[None]
            logp = (reference_logits(folder, ids)[0] / 0.8).log_softmax(-1)
            expected = np.zeros(len(datum))
            expected[1:] = logp[:-1].gather(1, ids[0, 1:, None])[:, 0]
            trained = datum.loss_mask
            assert np.abs(logprobs - expected)[trained].max() < 1e-4
        before = objective(batch, got)
        policy.forward_backward([batch[:2], batch[2:]], make_loss(AlgorithmConfig()))
        assert policy.optim_step(1e-3).grad_norm > 0
        assert objective(batch, [x for values in policy.forward([batch[:2], batch[2:]]) for x in values]) > before
    finally:
        policy.close()


@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen3_5_moe"])
def test_a_sequence_is_computed_as_if_the_others_of_its_row_were_others(tmp_path, family):
    """No state and no window of a Gated DeltaNet passes from one sequence to the next."""
    first, second, other = make_batch(count=3, vocab_size=515)
    policy = MegatronPolicy(make_config(make(family, tmp_path / family)))
    try:
        ((_, wanted),) = policy.forward([[first, second]])
        changed = dataclasses.replace(first, token_ids=other.token_ids[np.arange(len(first)) % len(other)])
        ((elsewhere, found),) = policy.forward([[changed, second]])
        ((alone,),) = policy.forward([[changed]])
    finally:
        policy.close()
    assert np.abs(wanted).max() > 1
    assert np.abs(found - wanted).max() < 2e-6 and np.abs(elsewhere - alone).max() < 2e-6


def objective(batch, logprobs) -> float:
    """Σ weight · log-prob, what a step of policy gradient raises."""
    return sum(float(datum.scaled_advantages @ x) for datum, x in zip(batch, logprobs, strict=True))


@pytest.mark.slow
def test_float32_parameters_of_a_bfloat16_model_keep_their_state(tmp_path):
    """Rates of decay are float32 between bfloat16 layers; their master weights and moments are saved as theirs."""
    folder = make("qwen3_5_moe", tmp_path / "model")
    micro_batches = [make_batch(count=4, vocab_size=515)]
    policy = MegatronPolicy(make_config(folder, dtype="bfloat16"))

    def step() -> dict[str, torch.Tensor]:
        policy.forward_backward(micro_batches, make_loss(AlgorithmConfig()))
        policy.optim_step(1e-3)
        return {name: tensor.clone() for name, tensor in policy.weight_source()}

    try:
        first = step()
        wide = {name.rpartition(".linear_attn.")[2] for name, tensor in first.items() if tensor.dtype == torch.float32}
        assert wide == {"A_log", "norm.weight"}
        policy.save_state(tmp_path / "saved")
        straight = step()
        assert not any(torch.equal(straight[name], first[name]) for name in first if name.endswith("A_log"))
        policy.load_state(tmp_path / "saved")
        resumed = step()
        assert all(torch.equal(straight[name], resumed[name]) for name in first)
    finally:
        policy.close()

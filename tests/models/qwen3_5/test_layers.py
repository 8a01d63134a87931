"""Gated DeltaNet layers of a model on Megatron."""

from __future__ import annotations

import json

import pytest
from policy_fixtures import make_batch, make_config
from tiny_configs import raw_config

pytest.importorskip("megatron_fleet.trainer.megatron")

from megatron_fleet.algorithms.losses import sft_loss
from megatron_fleet.config.schema import Config
from megatron_fleet.models.qwen3_5.modules import delta_rule, megatron
from megatron_fleet.trainer.megatron.policy import MegatronPolicy


def test_all_layers_share_the_boundaries_of_a_micro_batch(tmp_path, monkeypatch):
    hf = raw_config("qwen3_5_text", "v5") | {"vocab_size": 511, "mtp_num_hidden_layers": 0, "initializer_range": 0.06}
    (tmp_path / "config.json").write_text(json.dumps(hf))
    tree = make_config(tmp_path).model_dump()
    tree["policy"]["recompute"] = "full"
    policy, given = MegatronPolicy(Config.model_validate(tree), init="random"), []

    def rule(*tensors_and_lengths):
        given.append(tensors_and_lengths[-1])
        return delta_rule.packed_rule(*tensors_and_lengths)

    monkeypatch.setattr(megatron, "kernels", lambda: delta_rule.Kernels(delta_rule.convolve, rule))
    batch = make_batch(4)
    policy.forward_backward([batch[:2], batch[2:]], sft_loss)
    policy.close()
    layers = policy.hf_config["layer_types"].count("linear_attention")
    assert layers > 1 and len(given) == 2 * 2 * layers, "each micro-batch computes each layer twice"
    half = 2 * layers
    assert all(lengths is given[0] for lengths in given[:half])
    assert all(lengths is given[half] for lengths in given[half:])
    assert given[0] is not given[half] and isinstance(given[0], delta_rule.Lengths)

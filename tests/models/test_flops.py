"""The cost of a sequence against FLOPs counted in a transformers model."""

from __future__ import annotations

import json

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tiny_configs import raw_config  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from megatron_fleet.models.flops import SequenceCost  # noqa: E402
from megatron_fleet.models.hf_config import read_model  # noqa: E402

FAMILIES = ("qwen2", "qwen3_tied", "llama3", "qwen3_moe", "glm4_moe", "glm4_flash", "deepseek_v3")


def counted(config, tokens, trained):
    """FLOPs of a forward pass of ``transformers``, which multiplies masked pairs too."""
    with torch.device("cpu"), torch.no_grad():
        model = transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation="eager", experts_implementation="eager"
        ).eval()
        with FlopCounterMode(display=False) as counter:
            model(torch.zeros(1, tokens, dtype=torch.long), logits_to_keep=torch.arange(trained), use_cache=False)
    return counter.get_total_flops()


@pytest.mark.parametrize("family", FAMILIES)
def test_cost_is_what_a_forward_pass_takes(tmp_path, family):
    raw = raw_config(family, "v5")
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    cost = SequenceCost.of(read_model(raw))
    for tokens, trained in ((16, 0), (16, 16), (128, 40)):
        unmasked = cost([tokens], [trained])[0] + cost.pair * tokens * (tokens - 1) / 2
        assert unmasked == pytest.approx(counted(config, tokens, trained), rel=1e-3)


def test_cost_of_gated_delta_nets(tmp_path):
    """But for the rule itself, which transformers computes by other products."""
    from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

    raw = raw_config("qwen3_5_text", "v5")
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config, model, tokens = transformers.AutoConfig.from_pretrained(tmp_path), read_model(raw), 256
    with FlopCounterMode(display=False) as counter:
        q, v, g = torch.rand(1, tokens, 4, 8), torch.rand(1, tokens, 4, 12), torch.rand(1, tokens, 4)
        torch_chunk_gated_delta_rule(q, q, v, g=-g, beta=g)
    cost, rule = SequenceCost.of(model), 2 * 4 * (3 * 8 * 12 + 32 * (3 * 8 + 2 * 12))
    linear = sum(model.mixer.pattern)
    theirs = counted(config, tokens, 40) - linear * counter.get_total_flops()
    unmasked = cost([tokens], [40])[0] + cost.pair * tokens * (tokens - 1) / 2
    assert unmasked - linear * rule * tokens == pytest.approx(theirs, rel=2e-3)


def test_a_long_sequence_costs_more_than_its_tokens():
    """Each token sees itself and those before it; the head works at trained positions alone."""
    cost = SequenceCost(token=10.0, pair=2.0, prediction=100.0)
    assert cost([0, 1, 3, 3], [0, 0, 0, 2]).tolist() == [0, 12, 30 + 2 * 6, 30 + 2 * 6 + 200]
    assert cost([], []).tolist() == []
    assert cost([5], [1]).dtype == np.float64

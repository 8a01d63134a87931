"""What is refused before anything starts."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from policy_fixtures import write_config

from megatron_fleet.config.errors import UserError
from megatron_fleet.config.schema import Parallel
from megatron_fleet.policy.layout import check_layout, head_dim, padded_vocab_size, rope_theta


@pytest.fixture
def qwen3(tmp_path):
    return json.loads((write_config(tmp_path) / "config.json").read_text())


def test_fitting_layout(qwen3):
    check_layout(qwen3, Parallel(tensor=2, pipeline=4, data=3))


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        ({"tensor": 4}, r"parallel\.tensor=4 does not divide num_key_value_heads=2.*choose one of 1, 2\."),
        ({"tensor": 3}, r"parallel\.tensor=3 does not divide num_attention_heads=4"),
        ({"pipeline": 3}, r"parallel\.pipeline=3 does not divide num_hidden_layers=4.*choose one of 1, 2\."),
    ],
)
def test_impossible_layouts(qwen3, parallel, message):
    with pytest.raises(UserError, match=message):
        check_layout(qwen3, Parallel(**parallel))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "llama"}, "model_type='llama' is not supported"),
        ({"attention_bias": True}, "attention_bias=True is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope type 'yarn' is not supported"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}}, "rope type 'yarn'"),
        ({"rope_theta": None}, "add the RoPE base"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3 does not divide"),
    ],
)
def test_models_that_would_be_trained_wrongly(qwen3, change, message):
    with pytest.raises(UserError, match=message):
        check_layout(qwen3 | change, Parallel())


def test_missing_field(qwen3):
    del qwen3["intermediate_size"]
    with pytest.raises(UserError, match="intermediate_size is missing"):
        check_layout(qwen3, Parallel())


def test_both_dialects_of_rope():
    assert rope_theta({"rope_theta": 1e6, "rope_scaling": None}) == 1e6
    assert rope_theta({"rope_parameters": {"rope_theta": 5e6, "rope_type": "default"}}) == 5e6


def test_derived_sizes():
    assert head_dim({"hidden_size": 64, "num_attention_heads": 4}) == 16
    assert head_dim({"hidden_size": 64, "num_attention_heads": 4, "head_dim": 32}) == 32
    assert [padded_vocab_size(511, t) for t in (1, 2, 4)] == [511, 512, 512]


def test_importing_the_check_is_light():
    """Configuration is checked where neither torch nor Megatron are wanted."""
    code = "import sys, megatron_fleet.policy.layout; print([m for m in ('torch', 'megatron') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"

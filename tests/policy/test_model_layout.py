"""What is refused before anything starts."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from policy_fixtures import write_config

from megatron_fleet.config.errors import UserError
from megatron_fleet.config.schema import Parallel
from megatron_fleet.policy.layout import check_layout, padded_vocab_size, row_alignment


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
        ({"model_type": "gpt_neox"}, "model_type='gpt_neox' is not supported; use one of .*qwen3"),
        ({"attention_bias": True}, "attention_bias=True is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"use_sliding_window": True}, "use_sliding_window=True"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, "RoPE of type 'linear' is not supported"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0}}, "needs factor"),
        ({"rope_theta": None}, "add the RoPE base"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3 does not divide"),
        ({"surprise": 1}, "surprise=1 is an unknown field"),
    ],
)
def test_models_that_would_be_trained_wrongly(qwen3, change, message):
    with pytest.raises(UserError, match=message):
        check_layout(qwen3 | change, Parallel())


def test_models_that_megatron_computes_otherwise(qwen3):
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    llama = {key: value for key, value in qwen3.items() if key != "initializer_range"} | {"model_type": "llama"}
    check_layout(llama | {"rope_scaling": rope | {"original_max_position_embeddings": 8192}}, Parallel())
    with pytest.raises(UserError, match="Megatron-Core knows only"):
        check_layout(llama | {"rope_scaling": rope | {"original_max_position_embeddings": 4096}}, Parallel())


def test_models_that_are_converted_and_not_trained(qwen3):
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
    with pytest.raises(UserError, match="model_type='qwen3_moe' can be converted but not trained yet"):
        check_layout(qwen3 | experts | {"model_type": "qwen3_moe"}, Parallel())


def test_missing_field(qwen3):
    del qwen3["intermediate_size"]
    with pytest.raises(UserError, match="intermediate_size is missing"):
        check_layout(qwen3, Parallel())


def test_a_rank_of_padding_alone(qwen3):
    layout = Parallel(tensor=2)
    check_layout(qwen3 | {"vocab_size": 4}, layout)
    with pytest.raises(UserError, match=r"parallel\.tensor=2 is too large for vocab_size=3"):
        check_layout(qwen3 | {"vocab_size": 3}, layout)


def test_derived_sizes():
    assert [padded_vocab_size(511, t) for t in (1, 2, 4)] == [511, 512, 512]
    assert row_alignment(Parallel(tensor=4)) == 4


def test_importing_the_check_is_light():
    """Configuration is checked where neither torch nor Megatron are wanted."""
    code = "import sys, megatron_fleet.policy.layout; print([m for m in ('torch', 'megatron') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"

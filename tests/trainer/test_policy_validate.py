"""Settings that are refused before anything starts."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from policy_fixtures import make_config, write_config
from tiny_configs import raw_config

from megatron_fleet.config.errors import UserError
from megatron_fleet.config.schema import ParallelConfig, PolicyConfig, PrecisionConfig
from megatron_fleet.models.layout import (
    layers_of_stages,
    logprob_chunk,
    micro_batch_alignment,
    padded_vocab_size,
    sequence_alignment,
    validate,
)


@pytest.fixture
def qwen3(tmp_path):
    return json.loads((write_config(tmp_path) / "config.json").read_text())


def test_the_chunk_of_log_probs_follows_the_device(tmp_path):
    policy = make_config(tmp_path).policy
    by_device = policy.model_copy(update={"logprob_chunk": PolicyConfig.model_fields["logprob_chunk"].default})
    assert [logprob_chunk(by_device, cuda) for cuda in (False, True)] == [1024, 4096]
    assert [logprob_chunk(policy, cuda) for cuda in (False, True)] == [50, 50]


def test_fitting_layout(qwen3):
    validate(qwen3, ParallelConfig(tensor=2, pipeline=4, data=3))


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        ({"tensor": 4}, r"parallel\.tensor=4 does not divide num_key_value_heads=2.*choose one of 1, 2\."),
        ({"tensor": 3}, r"parallel\.tensor=3 does not divide num_attention_heads=4"),
        (
            {"pipeline": 3},
            r"parallel\.pipeline=3 .* leaves 4 of num_hidden_layers=4 .* parallel\.pipeline one of 1, 2, 4",
        ),
        ({"pipeline": 2, "virtual": 4}, r"parallel\.virtual=4 does not divide the 2 layers"),
        ({"virtual": 2}, r"parallel\.virtual=2 needs parallel\.pipeline above 1"),
        ({"first_stage_layers": 2}, r"first_stage_layers has no effect with parallel\.pipeline=1"),
        ({"pipeline": 2, "first_stage_layers": 1, "last_stage_layers": 2}, r"leaves 1 of num_hidden_layers=4"),
        ({"pipeline": 3, "first_stage_layers": 4}, r"leaves 0 of num_hidden_layers=4"),
        ({"data": 2, "expert": 2}, r"this model has none"),
        ({"tensor": 2, "expert_tensor": 2}, r"this model has none"),
    ],
)
def test_impossible_layouts(qwen3, parallel, message):
    with pytest.raises(UserError, match=message):
        validate(qwen3, ParallelConfig(**parallel))


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
        validate(qwen3 | change, ParallelConfig())


def test_models_that_megatron_computes_otherwise(qwen3):
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    llama = {key: value for key, value in qwen3.items() if key != "initializer_range"} | {"model_type": "llama"}
    validate(llama | {"rope_scaling": rope | {"original_max_position_embeddings": 8192}}, ParallelConfig())
    with pytest.raises(UserError, match="Megatron-Core knows only"):
        validate(llama | {"rope_scaling": rope | {"original_max_position_embeddings": 4096}}, ParallelConfig())


EXPERTS = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        ({"data": 3, "expert": 3}, r"parallel\.expert=3 does not divide number of experts=4.*choose one of 1, 2\."),
        ({"data": 3, "expert": 2}, r"2 × 1 does not divide the 3 ranks"),
        (
            {"tensor": 2, "sequence": False},
            r"a model with experts would get wrong gradients; set parallel\.sequence=true",
        ),
        ({"tensor": 2, "expert_tensor": 1}, r"expert_tensor=1 differs from parallel\.tensor=2 with parallel\.expert=1"),
        ({"data": 2, "expert_tensor": 2}, r"expert_tensor=2 differs from parallel\.tensor=1"),
        ({"tensor": 2, "expert_tensor": 5, "data": 5, "expert": 2}, r"expert_tensor=5 does not divide moe_inter"),
    ],
)
def test_layouts_that_experts_forbid(qwen3, parallel, message):
    with pytest.raises(UserError, match=message):
        validate(qwen3 | EXPERTS, ParallelConfig(**parallel))


def test_layouts_of_experts(qwen3):
    for parallel in ({"tensor": 2}, {"data": 2, "expert": 2}, {"tensor": 2, "expert": 2}, {"context": 4, "expert": 4}):
        validate(qwen3 | EXPERTS, ParallelConfig(**parallel))


def test_gated_delta_nets_need_sequence_parallelism_and_heads_for_every_rank():
    hybrid = raw_config("qwen3_5_text", "v4") | {"num_key_value_heads": 4}
    with pytest.raises(UserError, match="a model with Gated DeltaNet layers would get wrong gradients"):
        validate(hybrid, ParallelConfig(tensor=2, sequence=False))
    with pytest.raises(UserError, match="tensor=4 does not divide linear_num_key_heads=2"):
        validate(hybrid, ParallelConfig(tensor=4))
    validate(hybrid, ParallelConfig(tensor=2, context=2, pipeline=2))
    with pytest.raises(UserError, match=r"policy\.lora\.rank=8: this model has Gated DeltaNet layers"):
        validate(hybrid, ParallelConfig(), lora_rank=8)


def test_parts_that_cannot_be_recomputed(qwen3):
    for name in ("moe", "moe_act", "shared_experts", "mla_up_proj"):
        with pytest.raises(UserError, match=f"policy.recompute names {name}, which this model does not have"):
            validate(qwen3, ParallelConfig(), ("core_attn", name))
    validate(qwen3, ParallelConfig(), ("core_attn", "mlp", "layernorm"))
    validate(qwen3 | EXPERTS, ParallelConfig(), ("moe",))
    with pytest.raises(UserError, match="names mlp"):
        validate(qwen3 | EXPERTS, ParallelConfig(), ("mlp",))


def test_more_layers_than_a_stage_has_cannot_be_recomputed(qwen3):
    uneven = ParallelConfig(pipeline=2, first_stage_layers=1)
    for parallel, most in ((ParallelConfig(), 4), (uneven, 3), (ParallelConfig(pipeline=2, virtual=2), 1)):
        validate(qwen3, parallel, most)
        part = "model chunk" if parallel.virtual > 1 else "pipeline stage"
        message = rf"policy\.recompute={most + 1} is above the {most} layers of the longest {part}; lower it, or set "
        with pytest.raises(UserError, match=message + r"policy\.recompute=full"):
            validate(qwen3, parallel, most + 1)


def test_layers_of_stages():
    assert layers_of_stages(8, ParallelConfig(pipeline=4, virtual=2)) == [2, 2, 2, 2]
    assert layers_of_stages(61, ParallelConfig(pipeline=8, last_stage_layers=5)) == [8] * 7 + [5]
    assert layers_of_stages(7, ParallelConfig(pipeline=3, first_stage_layers=1, last_stage_layers=2)) == [1, 4, 2]
    assert layers_of_stages(5, ParallelConfig(pipeline=2, first_stage_layers=2, last_stage_layers=3)) == [2, 3]


def test_missing_field(qwen3):
    del qwen3["intermediate_size"]
    with pytest.raises(UserError, match="intermediate_size is missing"):
        validate(qwen3, ParallelConfig())


def test_a_rank_of_padding_alone(qwen3):
    layout = ParallelConfig(tensor=2)
    validate(qwen3 | {"vocab_size": 4}, layout)
    with pytest.raises(UserError, match=r"parallel\.tensor=2 is too large for vocab_size=3"):
        validate(qwen3 | {"vocab_size": 3}, layout)


def test_derived_sizes():
    assert [padded_vocab_size(511, t) for t in (1, 2, 4)] == [511, 512, 512]
    wide, fp8 = ParallelConfig(tensor=4, context=2), PrecisionConfig(recipe="fp8_blockwise")
    assert micro_batch_alignment(ParallelConfig(tensor=4), PrecisionConfig()) == 4
    assert micro_batch_alignment(ParallelConfig(tensor=4, sequence=False), PrecisionConfig()) == 1
    assert micro_batch_alignment(wide, PrecisionConfig()) == 16 and sequence_alignment(wide) == 4
    assert micro_batch_alignment(wide, fp8) == 128 * 16 and micro_batch_alignment(ParallelConfig(), fp8) == 128
    assert sequence_alignment(ParallelConfig(tensor=4)) == 1


def test_importing_the_check_is_light():
    """Configuration is checked where neither torch nor Megatron are wanted."""
    code = "import sys, megatron_fleet.models.layout; print([m for m in ('torch', 'megatron') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"

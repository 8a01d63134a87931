"""The weight table: it loses and repeats nothing, and it refuses what it does not describe."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_fleet.config.errors import UserError
from megatron_fleet.weights.mapping import WeightTable, check_tiling, prove_coverage

QWEN3 = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "intermediate_size": 48,
    "vocab_size": 101,
}


@settings(max_examples=60, deadline=None)
@given(
    tp=st.sampled_from([1, 2, 4, 8]),
    groups_per_rank=st.integers(1, 3),
    heads_per_group=st.integers(1, 4),
    head=st.integers(1, 5),
    ffn_per_rank=st.integers(1, 7),
    vocab=st.integers(1, 60),
    pad=st.integers(0, 3),
    tied=st.booleans(),
)
def test_every_row_once_and_every_tensor_used(
    tp, groups_per_rank, heads_per_group, head, ffn_per_rank, vocab, pad, tied
):
    groups = groups_per_rank * tp
    config = QWEN3 | {
        "num_key_value_heads": groups,
        "num_attention_heads": groups * heads_per_group,
        "head_dim": head,
        "intermediate_size": ffn_per_rank * tp,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
    }
    padded = -(-vocab // tp) * tp + pad * tp
    prove_coverage(WeightTable(config), tp, padded)


def test_qwen3_8b_has_the_published_tensor_count():
    config = QWEN3 | {
        "hidden_size": 4096,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 12288,
        "vocab_size": 151936,
    }
    table = WeightTable(config)
    assert len(table.tensors) == 36 * 11 + 3
    assert sum(a * (b[0] if b else 1) for a, *b in table.tensors.values()) == 8_190_735_360


def test_tensor_order_is_the_checkpoints():
    names = list(WeightTable(QWEN3).tensors)
    assert names[0] == "model.embed_tokens.weight"
    assert names[-2:] == ["model.norm.weight", "lm_head.weight"]
    assert [n.split(".")[2] for n in names[1:-2]] == ["0"] * 11 + ["1"] * 11


def test_tied_head_is_the_embedding():
    table = WeightTable(QWEN3 | {"tie_word_embeddings": True})
    assert "lm_head.weight" not in table.tensors
    assert table.is_inert("lm_head.weight")
    assert "output_layer.weight" not in table.parameters(range(2), first=True, last=True)
    assert "output_layer.weight" in table.parameters([1], first=False, last=True)
    assert table.pieces("output_layer.weight", 0, 1)[0].tensor == "model.embed_tokens.weight"


def test_untied_head_is_not_inert():
    assert not WeightTable(QWEN3).is_inert("lm_head.weight")
    assert WeightTable(QWEN3).is_inert("model.layers.1.self_attn.rotary_emb.inv_freq")


def test_both_layer_specs_name_the_same_tensors():
    table = WeightTable(QWEN3)
    local, fused = (table.parameters(range(2), True, True, spec) for spec in (0, 1))
    assert len(set(local) ^ set(fused)) == 2 * 2 * 2
    assert [table.pieces(n, 1, 2, 104) for n in local] == [table.pieces(n, 1, 2, 104) for n in fused]


def test_a_rank_of_nothing_but_padding_is_zeros():
    table = WeightTable(QWEN3 | {"vocab_size": 5})
    (piece,) = table.pieces("embedding.word_embeddings.weight", 3, 4, 16)
    assert (piece.rows, piece.tensor) == ((0, 4), None)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "llama"}, ["model_type", "llama", "qwen3"]),
        ({"attention_bias": True}, ["attention_bias"]),
        ({"hidden_size": None}, ["hidden_size", "missing"]),
    ],
)
def test_refuses_what_it_does_not_describe(change, words):
    config = {k: v for k, v in (QWEN3 | change).items() if v is not None}
    with pytest.raises(UserError) as e:
        WeightTable(config)
    assert all(w in str(e.value) for w in words)


@pytest.mark.parametrize(
    "name",
    [
        "decoder.layers.0.mlp.experts.linear_fc1.weight0",
        "decoder.layers.2.mlp.linear_fc2.weight",
        "decoder.layers.0.self_attention.linear_qkv.bias",
    ],
)
def test_refuses_unknown_parameters(name):
    with pytest.raises(UserError, match="no HF counterpart"):
        WeightTable(QWEN3).pieces(name, 0, 1)


def test_refuses_a_layout_that_does_not_divide():
    with pytest.raises(UserError, match=r"parallel.tensor=8 .*num_key_value_heads \(4\)"):
        WeightTable(QWEN3).pieces("decoder.layers.0.self_attention.linear_qkv.weight", 0, 8)


@pytest.mark.parametrize(
    ("boxes", "words"),
    [
        ([((0, 4), None), ((3, 6), None)], "overlap"),
        ([((0, 6), (0, 2)), ((0, 6), (1, 3))], "overlap"),
        ([((0, 3), None), ((4, 6), None)], "15 of 18"),
        ([((0, 6), (0, 2))], "12 of 18"),
    ],
)
def test_tiling_check_sees_gaps_and_overlaps(boxes, words):
    with pytest.raises(ValueError, match=words):
        check_tiling("t", (6, 3), boxes)

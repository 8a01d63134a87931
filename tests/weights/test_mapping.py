"""The weight table: it loses and repeats nothing, for sizes of any kind, and refuses what it does not describe."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from published_configs import published
from tiny_configs import FAMILIES, raw_config

from megatron_fleet.config.errors import UserError
from megatron_fleet.models.hf_config import architecture_of, text_config
from megatron_fleet.weights.mapping import (
    Matrix,
    Piece,
    WeightTable,
    check_tiling,
    prove_coverage,
    split_key,
    stack_key,
)

TABLES = {family: WeightTable(raw_config(family, "v4")) for family in FAMILIES}
PUBLISHED = published()
QKV, ROUTER = "decoder.layers.2.self_attention.linear_qkv.weight", "decoder.layers.2.mlp.router.weight"
FC1 = "decoder.layers.2.mlp.experts.experts.linear_fc1.weight"


@st.composite
def configs(draw):
    """A family's configuration with other sizes."""
    raw = raw_config(draw(st.sampled_from(FAMILIES)), "v4")
    part = text_config(raw, architecture_of(raw))
    size = st.integers(1, 9)
    groups, layers = draw(st.integers(1, 4)), draw(st.integers(2, 4))
    part |= {name: draw(size) for name in ("hidden_size", "intermediate_size", "vocab_size") if name in part}
    part |= {"num_hidden_layers": layers, "num_key_value_heads": groups}
    part |= {"num_attention_heads": groups * draw(st.integers(1, 4)), "head_dim": draw(size)}
    part |= {
        name: draw(size)
        for name in (
            *("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
            *("moe_intermediate_size", "n_shared_experts"),
        )
        if part.get(name) is not None
    }
    if "kv_lora_rank" in part:
        del part["head_dim"]
    for name in ("num_experts", "n_routed_experts"):
        if name in part:
            part |= {name: draw(st.sampled_from([4, 6])), "num_experts_per_tok": 2}
    if "first_k_dense_replace" in part:
        part |= {"first_k_dense_replace": draw(st.integers(0, layers - 1))}
        part |= {"num_nextn_predict_layers": draw(st.integers(0, 2))}
    if "linear_num_key_heads" in part:
        keys = draw(st.integers(1, 3))
        part |= {"linear_num_key_heads": keys, "linear_num_value_heads": keys * draw(st.integers(1, 3))}
        part |= {name: draw(size) for name in ("linear_key_head_dim", "linear_value_head_dim")}
        part |= {"linear_conv_kernel_dim": draw(size), "mtp_num_hidden_layers": draw(st.integers(0, 1))}
        kinds = st.sampled_from(["linear_attention", "full_attention"])
        part["layer_types"] = draw(st.lists(kinds, min_size=layers, max_size=layers))
        del part["full_attention_interval"]
    elif "mlp_only_layers" in part:
        part |= {"mlp_only_layers": draw(st.lists(st.integers(1, layers - 1), unique=True))}
    if raw is part:
        raw["tie_word_embeddings"] = draw(st.booleans())
    return raw


@settings(max_examples=80, deadline=None)
@given(raw=configs())
def test_every_row_once_and_every_tensor_used(raw):
    table = WeightTable(raw)
    prove_coverage(table)
    assert all(n > 0 for shape in table.tensors.values() for n in shape)


class Changed(WeightTable):
    """A table that is wrong in one place."""

    def __init__(self, raw, change):
        super().__init__(raw)
        self._change = change

    def matrices(self):
        for matrix in super().matrices():
            if matrix.key == QKV:
                pieces = self._change(list(matrix.pieces))
                matrix = Matrix(matrix.key, matrix.expert, matrix.shape, tuple(pieces), matrix.rule)
            yield matrix


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: p[1:], f"{QKV}: row 0 is not covered once"),
        (lambda p: p[:-1], f"{QKV}: .* of 192 rows are covered"),
        (lambda p: [Piece(p[0].rows, p[0].tensor, (1, 65)), *p[1:]], "q_proj.weight: rows .* overlap"),
        (lambda p: [Piece(p[0].rows, p[3].tensor, p[3].tensor_rows), *p[1:]], "q_proj.weight: rows belong to two"),
        (lambda p: [*p[:-1], Piece(p[-1].rows, p[-1].tensor, (0, 15))], "row 176 is not covered once"),
        (lambda p: [*p[:-1], Piece(p[-1].rows, None, p[-1].tensor_rows)], "row 176 is not covered once"),
        (lambda p: [*p[:-1], Piece(p[-1].rows, "model.norm.weight", p[-1].tensor_rows)], "overlap|covered"),
    ],
)
def test_the_proof_notices_what_is_wrong(change, message):
    with pytest.raises(ValueError, match=message):
        prove_coverage(Changed(raw_config("qwen3", "v4"), change))


def exact_name(name):
    """Weights that publishers quantise to FP8."""
    return "_proj" in name and name.endswith(".weight") and ".eh_proj" not in name


@pytest.mark.parametrize(
    ("name", "tensors", "parameters"),
    [
        ("Qwen2.5-7B", 339, 7_615_616_512),
        ("Qwen3-8B", 399, 8_190_735_360),
        ("Qwen3-30B-A3B", 18_867, 30_532_122_624),
        ("Qwen3-235B-A22B", 36_945, 235_093_634_560),
        ("Llama-3.1-8B", 291, 8_030_261_248),
        ("Llama-3.2-1B", 146, 1_235_814_400),
        ("Moonlight-16B-A3B", 5_344 - 27, 15_960_110_208),
    ],
)
def test_published_counts(name, tensors, parameters):
    """Tensors and parameters of published models; Moonlight's files have 27 stale buffers besides."""
    shapes = WeightTable(PUBLISHED[name]).tensors.values()
    assert (len(shapes), sum(map(math.prod, shapes))) == (tensors, parameters)


@pytest.mark.parametrize(
    ("name", "scales", "beside", "tensors"),
    [
        ("DeepSeek-V3", exact_name, 0, 91_991),
        ("Kimi-K2-Instruct", exact_name, 61, 139_644),
        ("Kimi-K2.5", lambda name: ".mlp.experts." in name, 335, 208_550),
    ],
)
def test_published_counts_of_quantised_models(name, scales, beside, tensors):
    """FP8 has one further tensor for a quantised one, INT4 two; beside them are stale buffers or a vision tower."""
    table = WeightTable(PUBLISHED[name])
    quantised = sum(map(scales, table.tensors)) * (2 if name == "Kimi-K2.5" else 1)
    assert len(table.tensors) + len(table.repeated) + quantised + beside == tensors


@pytest.mark.parametrize(
    ("name", "one_by_one", "vision", "tensors"),
    [
        ("Qwen3.5-0.8B", (), 12, 488),
        ("Qwen3.5-9B", (), 27, 775),
        ("Qwen3.5-27B", (), 27, 1199),
        ("Qwen3.5-35B-A3B", ("mtp.",), 27, 1811),
        ("Qwen3.6-35B-A3B", (), 27, 1045),
        ("Qwen3.5-397B-A17B", ("mtp.",), 27, 2924),
    ],
)
def test_published_counts_of_models_that_stack_experts(name, one_by_one, vision, tensors):
    """Qwen3.5 does not stack those of the prediction layer. A tower of n blocks has 12 n + 9 tensors."""
    table = WeightTable(PUBLISHED[name])
    stacked = {of: where.tensor for of, where in table.stacked.items() if not of.startswith(one_by_one)}
    assert len({stacked.get(tensor, tensor) for tensor in table.tensors}) + 12 * vision + 9 == tensors


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("DeepSeek-V3", 671_026_419_200), ("GLM-4.5", 358_337_791_296), ("GLM-4.5-Air", 110_468_824_832)],
)
def test_published_parameters_of_models_with_prediction_layers(name, parameters):
    """DeepSeek counts neither prediction layer nor its copies, GLM both."""
    table = WeightTable(PUBLISHED[name], prediction=name != "DeepSeek-V3")
    copies = [table.tensors[of] for of in table.repeated.values()]
    assert sum(map(math.prod, [*table.tensors.values(), *copies])) == parameters


def test_tensor_order_is_the_checkpoints():
    names = list(TABLES["qwen3"].tensors)
    assert names[0] == "model.embed_tokens.weight"
    assert names[-2:] == ["model.norm.weight", "lm_head.weight"]
    assert [n.split(".")[2] for n in names[1:-2]] == [i for i in "0123" for _ in range(11)]


def rows_of(matrix, rows=None):
    """(tensor, row) of every row, ``None`` for zeros."""
    out = []
    for piece in matrix.pieces if rows is None else matrix.restrict(rows):
        assert piece.rows[0] == len(out) and piece.rows[1] > piece.rows[0]
        span = range(*piece.tensor_rows)
        out += [(piece.tensor, row) for row in span] if piece.tensor else [None] * len(span)
        assert len(out) == piece.rows[1]
    return out


def test_query_heads_stand_before_the_key_and_value_head_they_share():
    heads, groups, width = 8, 2, 16
    expected = []
    for group in range(groups):
        for kind, first, count in (("q", group * heads // groups, heads // groups), ("k", group, 1), ("v", group, 1)):
            rows = range(first * width, (first + count) * width)
            expected += [(f"model.layers.2.self_attn.{kind}_proj.weight", row) for row in rows]
    assert rows_of(TABLES["qwen3"].find(QKV)) == expected


def test_gates_of_heads_stand_behind_their_queries():
    heads, groups, width = 8, 2, 16
    expected = []
    for group in range(groups):
        mine = range(group * heads // groups, (group + 1) * heads // groups)
        for part in (0, 1):
            expected += [("q_proj", (2 * head + part) * width + row) for head in mine for row in range(width)]
        expected += [(f"{kind}_proj", group * width + row) for kind in "kv" for row in range(width)]
    found = rows_of(TABLES["qwen3_5_text"].find("decoder.layers.3.self_attention.linear_qkv.weight"))
    assert [(name.split(".")[-2], row) for name, row in found] == expected


def test_parts_of_a_gated_delta_net_are_rows_of_one_tensor():
    keys, values = 2 * 8, 4 * 12
    for at, tensor in (("in_proj", "in_proj_qkv"), ("conv1d", "conv1d")):
        first = 0
        for part, rows in (("query", keys), ("key", keys), ("value", values)):
            matrix = TABLES["qwen3_5_text"].find(f"decoder.layers.1.self_attention.{at}.weight.{part}")
            name = f"model.layers.1.linear_attn.{tensor}.weight"
            assert rows_of(matrix) == [(name, first + row) for row in range(rows)]
            first += rows


def test_experts_in_a_stack_are_consecutive_rows():
    table, width = TABLES["qwen3_5_moe_text"], 48
    at = "model.layers.2.mlp.experts."
    where = [table.stacked[f"{at}{e}.{kind}_proj.weight"] for e in range(8) for kind in ("gate", "up")]
    assert {(w.tensor, w.shape) for w in where} == {(at + "gate_up_proj", (8, 2 * width, 96))}
    assert [w.rows for w in where] == [(n * width, (n + 1) * width) for n in range(16)]
    down = table.stacked[f"{at}5.down_proj.weight"]
    assert (down.tensor, down.shape, down.rows) == (at + "down_proj", (8, 96, width), (5 * 96, 6 * 96))


def test_gate_stands_before_up():
    rows = rows_of(TABLES["qwen3_moe"].find(FC1, (5,)))
    at = "model.layers.2.mlp.experts.5."
    assert rows == [(f"{at}{x}_proj.weight", row) for x in ("gate", "up") for row in range(48)]


@pytest.mark.parametrize("family", FAMILIES)
def test_find_inverts_the_table_under_every_form_of_a_key(family):
    table, seen = TABLES[family], set()
    for matrix in table.matrices():
        expert = () if matrix.expert is None else (matrix.expert,)
        assert (matrix.key, expert) not in seen
        seen.add((matrix.key, expert))
        for key in (matrix.key, *matrix.aliases):
            stacked, layer = stack_key(key)
            forms = [(key, expert)] + ([] if layer is None else [(stacked, (layer, *expert))])
            for form in forms:
                assert split_key(*form) == (key, matrix.expert)
                assert table.find(*form) == matrix


@pytest.mark.parametrize("family", FAMILIES)
def test_aliases_are_not_shared(family):
    """A key means one thing: no alias is the key, or an alias, of another tensor."""
    keys = [(key, m.expert) for m in TABLES[family].matrices() for key in (m.key, *m.aliases)]
    assert len(keys) == len(set(keys))


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_rows_are_what_they_are_in_the_whole(data):
    table = TABLES[data.draw(st.sampled_from(FAMILIES))]
    matrix = data.draw(st.sampled_from(list(table.matrices())))
    first = data.draw(st.integers(0, matrix.shape[0] + 8 * matrix.rule.vocabulary))
    last = data.draw(
        st.integers(first, matrix.shape[0] + 16 if matrix.rule.vocabulary else max(first, matrix.shape[0]))
    )
    whole = rows_of(matrix) + [None] * 16
    assert rows_of(matrix, (first, last)) == whole[first:last]


def test_a_rank_of_nothing_but_padding_is_zeros():
    (piece,) = TABLES["qwen3"].find("embedding.word_embeddings.weight").restrict((520, 524))
    assert piece == Piece((0, 4), None, (0, 4))


def test_only_a_vocabulary_is_padded():
    with pytest.raises(UserError, match=r"linear_qkv\.weight has rows up to 193; config\.json asks for 192"):
        TABLES["qwen3"].find(QKV).restrict((100, 193))
    assert {m.key for m in TABLES["kimi_k25"].matrices() if m.rule.vocabulary} == {
        "embedding.word_embeddings.weight",
        "output_layer.weight",
    }


@pytest.mark.parametrize(
    ("family", "key", "lead"),
    [
        ("qwen3", "decoder.layers.4.mlp.linear_fc2.weight", ()),
        ("qwen3", "decoder.layers.mlp.linear_fc2.weight", (4,)),
        ("qwen3", "decoder.layers.mlp.linear_fc2.weight", (-1,)),
        ("qwen3", "decoder.layers.mlp.linear_fc2.weight", ()),
        ("qwen3", "decoder.layers.0.mlp.linear_fc2.weight", (0,)),
        ("qwen3", "decoder.layers.0.mlp.linear_fc2.weight.", ()),
        ("qwen3", "decoder.layers.0.self_attention.linear_qkv.bias", ()),
        ("qwen3", "decoder.layers.0.mlp.router.weight", ()),
        ("qwen3", "optimizer.state.exp_avg.decoder.layers.0.mlp.linear_fc2.weight", ()),
        ("qwen3", "embedding.word_embeddings.weight", (0,)),
        ("qwen3_moe", FC1, ()),
        ("qwen3_moe", FC1, (8,)),
        ("qwen3_moe", FC1, (-1,)),
        ("qwen3_moe", ROUTER, (0,)),
        ("deepseek_v3", "decoder.layers.0.mlp.router.weight", ()),
        ("deepseek_v3", "decoder.layers.1.mlp.linear_fc2.weight", ()),
        ("deepseek_v3", "mtp.layers.0.eh_proj.weight", ()),
        ("deepseek_v3_mtp", "mtp.layers.1.eh_proj.weight", ()),
        ("moonlight", "decoder.layers.1.self_attention.linear_q_down_proj.weight", ()),
        ("moonlight", "decoder.layers.1.self_attention.linear_q_proj.layer_norm_weight", ()),
    ],
)
def test_refuses_tensors_that_the_model_does_not_have(family, key, lead):
    with pytest.raises(UserError, match=r"Megatron tensor .* has no HF counterpart"):
        TABLES[family].find(key, lead)


@pytest.mark.parametrize(
    ("key", "stacked"),
    [
        ("decoder.layers.12.mlp.linear_fc1.weight", ("decoder.layers.mlp.linear_fc1.weight", 12)),
        ("decoder.final_layernorm.weight", ("decoder.final_layernorm.weight", None)),
        (
            "mtp.layers.0.transformer_layer.mlp.router.weight",
            ("mtp.layers.0.transformer_layer.mlp.router.weight", None),
        ),
    ],
)
def test_keys_of_stacked_layers(key, stacked):
    assert stack_key(key) == stacked
    name, layer = stacked
    assert split_key(name, () if layer is None else (layer,)) == (key, None)
    assert split_key(name, (3,) if layer is None else (layer, 3)) == (key, 3)


def test_a_tied_head_is_the_embedding():
    table = TABLES["qwen3_tied"]
    assert "lm_head.weight" not in table.tensors
    assert table.repeated == {"lm_head.weight": "model.embed_tokens.weight"}
    assert "output_layer.weight" not in {m.key for m in table.matrices()}
    assert {name for name, _ in rows_of(table.find("output_layer.weight"))} == {"model.embed_tokens.weight"}
    assert "lm_head.weight" in TABLES["qwen3"].tensors and not TABLES["qwen3"].repeated


def test_prediction_layers_may_be_left_out():
    raw = raw_config("deepseek_v3_mtp", "v4")
    with_it, without = WeightTable(raw), WeightTable(raw, prediction=False)
    more = set(with_it.tensors) - set(without.tensors)
    assert all(name.startswith("model.layers.4.") for name in more) and "model.layers.4.eh_proj.weight" in more
    assert with_it.repeated == {
        "model.layers.4.embed_tokens.weight": "model.embed_tokens.weight",
        "model.layers.4.shared_head.head.weight": "lm_head.weight",
    }
    for name in (*more, *with_it.repeated):
        assert without.is_passthrough(name) and without.has_prediction([name])
        assert not with_it.is_passthrough(name)
    assert not without.has_prediction(without.tensors) and not without.repeated
    tied = WeightTable(raw | {"tie_word_embeddings": True}).repeated
    assert set(tied.values()) == {"model.embed_tokens.weight"} and len(tied) == 3


@pytest.mark.parametrize(
    ("family", "name", "passthrough"),
    [
        ("qwen3", "model.layers.1.self_attn.rotary_emb.inv_freq", True),
        ("qwen3", "model.layers.1.self_attn.rotary_emb.inv_freq.x", False),
        ("qwen3", "lm_head.weight", False),
        ("qwen3", "visual.patch_embed.proj.weight", False),
        ("qwen3_vl", "model.visual.patch_embed.proj.weight", True),
        ("qwen3_vl", "model.language_model.layers.0.self_attn.rotary_emb.inv_freq", True),
        ("kimi_k25", "vision_tower.encoder.blocks.0.wo.weight", True),
        ("kimi_k25", "mm_projector.proj.0.bias", True),
        ("kimi_k25", "language_modelXmodel.layers.0.self_attn.rotary_emb.inv_freq", False),
        ("deepseek_v3", "model.layers.4.enorm.weight", True),
        ("deepseek_v3", "model.layers.3.enorm.weight", False),
        ("deepseek_v3", "model.layers.40.enorm.weight", False),
    ],
)
def test_what_megatron_does_not_hold(family, name, passthrough):
    assert TABLES[family].is_passthrough(name) is passthrough


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


def test_tiling_check_accepts_tiles_in_any_order():
    check_tiling("t", (6, 3), [((3, 6), (2, 3)), ((0, 3), None), ((3, 6), (0, 2)), ((0, 3), None)])
    check_tiling("t", (6,), [((2, 6), None), ((0, 2), None)])

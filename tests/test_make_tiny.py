"""tools/make_tiny.py, which remakes the tiny model."""

import random
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron_fleet.trainer.megatron")
transformers = pytest.importorskip("transformers")

from megatron_fleet.config.load import ROOT  # noqa: E402
from megatron_fleet.embedded_fleet.tasktype import Choices  # noqa: E402
from megatron_fleet.models.chat.parser import parse_turn  # noqa: E402
from megatron_fleet.models.chat.tokenizer import train_tokenizer  # noqa: E402
from megatron_fleet.models.qwen3.chat import (  # noqa: E402
    HERMES,
    IM_END,
    QWEN3_TOKENS,
)

sys.path.append(str(Path(__file__).parents[1] / "tools"))
import make_tiny  # noqa: E402


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return train_tokenizer(
        make_tiny.corpus(random.Random(0)), make_tiny.VOCABULARY, tmp_path_factory.mktemp("tokenizer"), QWEN3_TOKENS
    )


@pytest.mark.slow
@pytest.mark.in_turn(number=0, of=4)
@pytest.mark.parametrize("whole", [False, True])
def test_demonstrations_are_episodes_whose_agent_turns_are_trained(tokenizer, whole):
    rows = make_tiny.episodes(tokenizer, whole=whole)(random.Random(0))
    for _ in range(20):
        row = next(rows)
        text = tokenizer.decode(row.token_ids.tolist())
        assert ("<tools>" in text) == whole
        trained = tokenizer.decode(row.token_ids[row.loss_mask].tolist())
        turns = [parse_turn(turn, HERMES) for turn in trained.split(IM_END) if turn]
        assert not any(turn.errors for turn in turns)
        assert [len(turn.tool_calls) for turn in turns] == [1] * (len(turns) - 1) + [0]
        assert turns[-1].final_answer is not None
        assert "<tool_response>" not in trained


def test_tables_are_copied_row_by_row(tokenizer):
    rows = make_tiny.tables(tokenizer)(random.Random(0))
    for _ in range(20):
        row = next(rows)
        shown = tokenizer.decode(row.token_ids[~row.loss_mask].tolist()).splitlines()
        written = tokenizer.decode(row.token_ids[row.loss_mask].tolist()).splitlines()
        assert (written[0], written[-1]) == ("<think>", "</think>")
        assert written[1:-1]
        assert {frozenset(line.split()) for line in written[1:-1]} <= {frozenset(line.split()) for line in shown}


def test_a_row_written_again_begins_with_what_it_is_told_by():
    table = "kind status id\ntax active A10\ngift frozen A11\njoint active A12"
    seen = {line for seed in range(200) for line in make_tiny.written_again(table, random.Random(seed))}
    assert seen == {
        *("tax active A10", "gift frozen A11", "joint active A12"),
        *("A10 tax active", "A11 gift frozen", "A12 joint active"),
        "frozen gift A11",
    }


def test_thinking_begins_with_what_a_row_was_chosen_by():
    choices = Choices("Ann", mistakes=0.0, rng=random.Random(0))
    choices.row([{"kind": "tax", "status": "active"}, {"kind": "gift", "status": "frozen"}], status="frozen")
    assert choices.holds(False) is False
    assert choices.notes == ["frozen gift", "no"]


def test_first_heads_look_one_token_back_the_next_two_and_so_on():
    weights = make_tiny.initial_weights(torch.Generator().manual_seed(1))
    config = transformers.Qwen3Config(**make_tiny.ARCHITECTURE, vocab_size=make_tiny.VOCABULARY)
    model = transformers.Qwen3ForCausalLM._from_config(config, attn_implementation="eager")
    assert model.load_state_dict(weights, strict=False).missing_keys == ["lm_head.weight"]
    tokens = torch.randint(0, make_tiny.VOCABULARY, (1, 300), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        attention = model(tokens, output_attentions=True).attentions[0][0]
    for head, weight in enumerate(attention):
        back = torch.arange(300) - weight.argmax(-1)
        assert (back[10:] == head + 1).float().mean() > 0.9


@pytest.mark.slow
@pytest.mark.in_turn(number=1, of=4)
def test_a_short_remake_gives_a_model_that_transformers_loads(tmp_path, monkeypatch):
    monkeypatch.setattr(make_tiny, "TABLE_STEPS", 3)
    monkeypatch.setattr(make_tiny, "SHORT_STEPS", 3)
    monkeypatch.setattr(make_tiny, "WHOLE_STEPS", 2)
    assert make_tiny.main(["--out", str(tmp_path / "tiny")]) == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "tiny")
    transformers.AutoTokenizer.from_pretrained(tmp_path / "tiny")
    assert 0.9e6 < model.num_parameters() < 4e6


def test_the_shipped_model_is_small():
    assert sum(p.stat().st_size for p in (ROOT / "assets" / "tiny").iterdir()) < 10_000_000

"""Selection, pairs, transcripts and Markdown: what goes onto a page, in which form."""

from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from run_maker import RunMaker, episode, groups, trajectory

from megatron_fleet.agents.trajectory import Group
from megatron_fleet.analysis import render
from megatron_fleet.analysis import transcripts as transcripts_module
from megatron_fleet.analysis.document import Cell, Document, ReportSection, Table
from megatron_fleet.analysis.episodes import message_text
from megatron_fleet.analysis.run import read_run
from megatron_fleet.analysis.selection import choose_pairs, first_difference, sample, spread
from megatron_fleet.analysis.transcripts import Transcripts, piece_text, run_lengths, shorten, unpack

TINY = Path(__file__).parents[2] / "assets" / "tiny"


@given(st.integers(1, 60), st.integers(2, 9))
def test_spread_keeps_the_ends(count, wanted):
    steps = [3 * i for i in range(count)]
    chosen = spread(steps, wanted)
    assert len(set(chosen)) == len(chosen) == min(count, wanted)
    assert (chosen[0], chosen[-1]) == (steps[0], steps[-1]) and chosen == sorted(chosen)


def test_a_sample_keeps_the_rare_endings():
    many = [episode(line=i) for i in range(500)]
    rare = [episode(line=500, outcome="timeout", reward=None), episode(line=501, env="bank", reward=0.0)]
    chosen = sample([*many, *rare], 5)
    assert len(chosen) == 5 and all(e in chosen for e in rare)


def test_pairs_are_of_one_task_and_sample_and_changed_results_come_first():
    before = [episode(task=f"t{i}", sample=s, reward=float(i == 0)) for i in range(5) for s in (0, 1)]
    after = [episode(task=f"t{i}", sample=s, reward=float(i == 3 and s == 1)) for i in range(4) for s in (1, 0)]
    pairs = choose_pairs(before, after, limit=3)
    assert [(p.before.task, p.before.sample, p.verdict) for p in pairs[:2]] == [("t3", 1, "gained"), ("t0", 0, "lost")]
    assert len(pairs) == 3 and len({p.before.task for p in pairs}) == 3
    assert all((p.before.task, p.before.sample) == (p.after.task, p.after.sample) for p in pairs)
    (unknown,) = choose_pairs([episode(reward=None)], [episode(reward=1.0)])
    assert unknown.verdict == "unknown"


def test_the_first_difference():
    def said(*texts):
        return episode(messages=tuple(("assistant", t) for t in texts))

    assert first_difference(said("a", "b"), said("a", "c")) == 1
    assert first_difference(said("a"), said("a", "b")) == 1
    assert first_difference(said("a"), said("a")) is None


@given(st.lists(st.booleans(), max_size=40))
def test_run_lengths_tell_the_mask(mask):
    value, rebuilt = False, []
    for length in run_lengths(np.array(mask, dtype=bool)):
        rebuilt += [value] * length
        value = not value
    assert rebuilt == mask


def test_a_transcript_has_the_sampled_tokens_and_their_log_probs(make_run: RunMaker):
    make_run.evaluate(0, [Group(0, "t", "shop", [trajectory(ids=[1, 2, 3]), trajectory(ids=[5, 6, 7, 8, 9])])])
    run = read_run(make_run.folder)
    transcripts = Transcripts(run, 100_000)
    transcripts.add(run.episodes("eval", 0))
    transcripts.add(run.episodes("eval", 0))
    first, second = map(unpack, transcripts.blobs.values())
    assert (first["ids"], first["runs"], first["logprobs"]) == ([1, 2, 3], [3], [])
    assert (second["ids"], second["runs"], second["logprobs"]) == ([5, 6, 7, 8, 9], [3, 2], [-0.5, -1.0])
    assert second["versions"] == [[3, 2]]
    assert transcripts.pieces == {} and any("tokenizer.json" in note for note in run.notes)


def test_long_episodes_are_cut_with_their_mask_and_log_probs(make_run: RunMaker, monkeypatch):
    monkeypatch.setattr(transcripts_module, "MAX_TOKENS", 4)
    make_run.evaluate(0, [Group(0, "t", "shop", [trajectory(), trajectory(ids=[1, 2, 3, 4])])])
    run = read_run(make_run.folder)
    transcripts = Transcripts(run, 100_000)
    transcripts.add(run.episodes("eval", 0))
    cut, whole = map(unpack, transcripts.blobs.values())
    assert (cut["ids"], cut["runs"], cut["logprobs"], cut["cut"]) == ([5, 6, 7, 8], [3, 1], [-0.5], 5)
    assert whole["ids"] == [1, 2, 3, 4] and "cut" not in whole


def test_rewritten_history_is_marked(make_run: RunMaker):
    own = trajectory(ids=[1, 2, 3, 4, 5])
    own.segment_starts = (0, 3)
    make_run.evaluate(0, [Group(0, "t", "shop", [own])])
    run = read_run(make_run.folder)
    transcripts = Transcripts(run, 100_000)
    transcripts.add(run.episodes("eval", 0))
    assert unpack(transcripts.blobs["eval-0-0"])["segments"] == [3]


def test_every_id_of_the_tiny_model_has_a_text():
    tokenizer = tokenizers.Tokenizer.from_file(str(TINY / "tokenizer.json"))
    texts = [piece_text(tokenizer, i) for i in range(tokenizer.get_vocab_size())]
    assert all(texts) and not any("\ufffd" in text for text in texts)
    assert piece_text(tokenizer, tokenizer.token_to_id("<think>")) == "<think>"
    (euro, *rest) = tokenizer.encode("€", add_special_tokens=False).ids
    assert rest and piece_text(tokenizer, euro) == f"‹{tokenizer.id_to_token(euro)}›"
    assert piece_text(tokenizer, 10**7) == "‹10000000›" and piece_text(tokenizer, -1) == "‹-1›"


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"content": "a"}, "a"),
        ({"content": None}, ""),
        (
            {"content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {}}]},
            "a\n[image]",
        ),
        ({"content": "", "tool_calls": [{"id": 1}]}, '\n[{"id": 1}]'),
        ({"content": {"odd": 1}}, '{"odd": 1}'),
        ({}, ""),
    ],
)
def test_messages_of_every_shape_have_a_text(message, text):
    assert message_text(message) == text


def test_a_budget_is_kept_and_what_it_leaves_out_is_counted(make_run: RunMaker):
    make_run.evaluate(0, groups({f"t{i}": [0.0] * 4 for i in range(5)}))
    run = read_run(make_run.folder)
    transcripts = Transcripts(run, 5000)
    transcripts.add(run.episodes("eval", 0))
    assert 0 < len(transcripts.blobs) < 20 and len(transcripts.blobs) + transcripts.left_out == 20
    assert sum(len(blob) for blob in transcripts.blobs.values()) < 5000


@given(st.text(max_size=60), st.integers(2, 20))
def test_shortened_text_keeps_both_ends(text, limit):
    short = shorten(text, limit)
    assert short == text if len(text) <= limit else text[: limit // 2] + "\n" in short and short.endswith(text[-1])


def test_markdown_escapes_what_trajectories_say():
    evil = "a|b <img src=x>\n# head [x](javascript:y) `c`"
    table = Table(("h",), ((Cell(evil),),))
    text = render.markdown(Document("t", "s", (ReportSection("a", "A", (table,)),)))
    (row,) = [line for line in text.splitlines() if "img" in line]
    assert row == r"| a\|b \<img src=x\> \# head \[x\](javascript:y) \`c\` |"

"""Selection, pairs, transcripts, drawing and Markdown: what goes onto a page, in which form."""

import json
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from run_maker import RunMaker, episode, groups, trajectory

from megatron_fleet.agents.trajectory import Group
from megatron_fleet.analysis import markdown, svg
from megatron_fleet.analysis import transcripts as transcripts_module
from megatron_fleet.analysis.curves import charts, thin
from megatron_fleet.analysis.document import Cell, Chart, Document, Section, Series, Table
from megatron_fleet.analysis.episodes import message_text
from megatron_fleet.analysis.pairs import choose_pairs, first_difference
from megatron_fleet.analysis.run import read_run
from megatron_fleet.analysis.selection import sample, spread
from megatron_fleet.analysis.transcripts import Transcripts, piece_text, run_lengths, shorten

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
    first, second = (json.loads(blob) for blob in transcripts.blobs.values())
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
    cut, whole = (json.loads(blob) for blob in transcripts.blobs.values())
    assert (cut["ids"], cut["runs"], cut["logprobs"], cut["cut"]) == ([5, 6, 7, 8], [3, 1], [-0.5], 5)
    assert whole["ids"] == [1, 2, 3, 4] and "cut" not in whole


def test_rewritten_history_is_marked(make_run: RunMaker):
    own = trajectory(ids=[1, 2, 3, 4, 5])
    own.segment_starts = (0, 3)
    make_run.evaluate(0, [Group(0, "t", "shop", [own])])
    run = read_run(make_run.folder)
    transcripts = Transcripts(run, 100_000)
    transcripts.add(run.episodes("eval", 0))
    assert json.loads(transcripts.blobs["eval-0-0"])["segments"] == [3]


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


@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6))
def test_ticks_lie_inside_and_are_evenly_spaced(low, width):
    width = max(width, 1e-8 * abs(low))  # floats have no steps much finer than these ticks
    found = svg.ticks(low, low + width)
    assert 2 <= len(found) <= 6
    assert all(low - 1e-6 * width <= t <= low + width * (1 + 1e-6) for t in found)
    gaps = np.diff(found)
    assert np.allclose(gaps, gaps[0], rtol=1e-6, atol=1e-9 * max(abs(low), width))


def test_a_chart_of_hostile_names_is_well_formed():
    evil = '"><script>alert(1)</script>'
    chart = Chart(evil, (Series(evil, ((0.0, 1.0), (1.0, float(2)))), Series("one", ((3.0, 0.0),))), marks=(1,))
    root = ElementTree.fromstring(svg.draw(chart))
    assert root.get("aria-label") == evil and not list(root.iter("script"))
    assert json.loads(root.get("data-chart"))["labels"] == [evil, "one"]
    assert len(root.findall(".//circle")) == 1


def test_shares_are_drawn_on_the_whole_scale():
    series = (Series("a", ((0.0, 0.1), (1.0, 0.2))),)
    ends = []
    for share in (True, False):
        (line,) = ElementTree.fromstring(svg.draw(Chart("c", series, share))).iter("polyline")
        ends.append(float(line.get("points").split(",")[-1]))
    height = svg.HEIGHT - svg.TOP - svg.BOTTOM
    assert ends == pytest.approx([svg.TOP + 0.8 * height, svg.TOP], abs=0.1)


def test_curves_have_the_values_of_the_log_and_the_resumes():
    rows = [
        {"step": i, "attempt": i // 2, "reward/avg_raw_reward": i / 4, "reward/shop/avg_raw_reward": None}
        for i in range(4)
    ]
    rows[0]["eval/all/pass_at_1"] = 0.5
    rows[0]["eval/shop/pass_at_1"] = 0.75
    drawn = {chart.title: chart for chart in charts(rows)}
    reward = drawn["Reward and pass@1"]
    assert [s.points for s in reward.series] == [((0, 0.0), (1, 0.25), (2, 0.5), (3, 0.75)), ((0, 0.5),)]
    assert reward.marks == (2,)
    assert [s.label for s in drawn["Evaluation pass@1 per environment"].series] == ["shop"]
    assert "Training reward per environment" not in drawn
    assert charts([]) == ()


def test_of_many_environments_those_that_changed_are_drawn_and_the_title_says_so():
    gains = {f"e{i:02d}": 0.9 if i % 3 == 0 else 0.01 * i for i in range(20)}
    rows = [{"step": s, **{f"eval/{e}/pass_at_1": g * s for e, g in gains.items()}} for s in (0, 1)]
    (chart,) = charts(rows)
    assert chart.title == "Evaluation pass@1 per environment: 8 of 20 lines"
    assert [s.label for s in chart.series] == sorted(sorted(gains, key=lambda e: -gains[e])[:8])
    (few,) = charts([{"step": 0, "eval/e/pass_at_1": 0.5}])
    assert few.title == "Evaluation pass@1 per environment"


def test_thinned_points_keep_the_mean():
    points = [(float(i), float(i % 7)) for i in range(1000)]
    few = thin(points, 100)
    assert len(few) == 100 and np.mean([y for _, y in few]) == pytest.approx(np.mean([y for _, y in points]))
    assert thin(points[:5], 100) == tuple(points[:5])


def test_markdown_escapes_what_trajectories_say():
    evil = "a|b <img src=x>\n# head [x](javascript:y) `c`"
    table = Table(("h",), ((Cell(evil),),))
    text = markdown.render(Document("t", "s", (Section("a", "A", (table,)),)))
    (row,) = [line for line in text.splitlines() if "img" in line]
    assert row == r"| a\|b \<img src=x\> \# head \[x\](javascript:y) \`c\` |"
    assert markdown.sparkline([1, 2, 3]) == "▁▅█" and markdown.sparkline([2, 2]) == "▁▁"

"""Results that were cut: pages hold all of them, searches name the right page, and the episode loop offers both."""

import dataclasses

import pytest
from agent_doubles import CALL, SETTINGS, TASK, ScriptedEngine, ScriptedEnvironment, Turn, use
from hypothesis import given
from hypothesis import strategies as st

from megatron_fleet.agents import local_tools as local_tools_module
from megatron_fleet.agents.local_tools import ToolOutputs, matches
from megatron_fleet.agents.token_conversation import run_episode
from megatron_fleet.config.schema import AgentConfig
from megatron_fleet.envs.base import Observation


@given(st.lists(st.text(max_size=90), max_size=4), st.integers(1, 30))
def test_pages_put_together_are_the_result(texts, size):
    outputs = ToolOutputs(size, paging=True)
    cut = [text for text in texts if outputs.cut(text)[1]]
    assert cut == [text for text in texts if len(text) > size]
    for number, text in enumerate(cut, 1):
        pages, page = [], 1
        while sum(map(len, pages)) < len(text):
            head, _, body = outputs.page(number, page).partition("\n")
            assert head == f"[page {page} of {-(-len(text) // size)} of output {number}]"
            pages.append(body)
            page += 1
        assert "".join(pages) == text
        with pytest.raises(LookupError, match=f"has the pages 1 to {page - 1}"):
            outputs.page(number, page)
    with pytest.raises(LookupError, match="there is no output"):
        outputs.page(len(cut) + 1, 1)


@given(st.text(st.sampled_from("abİ .*\n"), max_size=400), st.text(st.sampled_from("abİ.*"), min_size=1, max_size=3))
def test_a_search_is_plain_text_and_finds_the_first_place(text, pattern):
    found = list(matches(text, pattern))
    places = [i for i in range(len(text)) if text[i : i + len(pattern)].lower() == pattern.lower()]
    assert [place for place, _ in found][:1] == places[:1]
    assert {place for place, _ in found} <= set(places)
    assert all("\n" not in snippet for _, snippet in found)


def test_a_repetitive_pattern_takes_linear_time():
    """Hours, where every place of the text is compared with the whole pattern."""
    assert list(matches("a" * 1_000_000, "A" * 300_000 + "b")) == []


def test_an_expression_that_would_take_for_ever_is_only_text():
    assert list(matches("a" * 5000 + "!", "(a+)+$")) == []


def test_a_search_names_outputs_and_pages_and_ends():
    outputs = ToolOutputs(100, paging=True)
    outputs.cut("x" * 250 + "needle" + "y" * 10)
    outputs.cut("Needle" + "z" * 200)
    lines = outputs.search("needle", None).split("\n")
    assert [line.split(":")[0] for line in lines] == ["output 1, page 3", "output 2, page 1"]
    assert outputs.search("needle", 2).startswith("output 2, page 1: Needlez")
    assert outputs.search("haystack", None) == "No match."
    outputs.cut("ha" * 5000)
    lines = outputs.search("ha", 3).split("\n")
    assert len(lines) == local_tools_module.MAX_MATCHES + 1 and lines[-1].startswith("[more matches")


def test_what_is_kept_of_a_result_is_bounded(monkeypatch):
    monkeypatch.setattr(local_tools_module, "MAX_KEPT_CHARS", 250)
    outputs = ToolOutputs(100, paging=True)
    shown, _ = outputs.cut("x" * 1000)
    assert "page 1 of 3" in shown and outputs.page(1, 3).endswith("\n" + "x" * 50)


def test_what_is_kept_of_an_episode_is_bounded(monkeypatch):
    monkeypatch.setattr(local_tools_module, "MAX_EPISODE_CHARS", 500)
    outputs = ToolOutputs(100, paging=True)
    for letter in "abc":
        outputs.cut(letter * 200)
    assert sum(map(len, outputs._kept)) == 400
    for number in (2, 3):
        assert outputs.page(number, 2).endswith("abc"[number - 1] * 100)
    with pytest.raises(LookupError, match="output 1 is no longer kept; call the tool again"):
        outputs.page(1, 1)
    with pytest.raises(LookupError, match="output 1 is no longer kept"):
        outputs.search("a", 1)
    assert outputs.search("a", None) == "No match." and "output 3, page 1" in outputs.search("c", None)


async def test_the_policy_pages_through_what_was_cut(tokenizer, renderer):
    result = "".join(f"row {i} " for i in range(120))
    env = ScriptedEnvironment(step_script=[Observation(result)])
    script = [
        Turn(CALL),
        use("view_tool_output", '{"id": 1, "page": 2}'),
        use("search_tool_output", '{"pattern": "ROW 99"}'),
        use("view_tool_output", '{"id": 2, "page": 1}'),
        use("search_tool_output", '{"pattern": " "}'),
        Turn("99 <done>"),
    ]
    engine = ScriptedEngine(tokenizer, script)
    settings = dataclasses.replace(SETTINGS, agent=AgentConfig(max_tool_output_chars=300, paging=True))
    t = await run_episode(TASK, env, engine, renderer, settings, None, session="s")
    shown = [m["content"] for m in t.messages if m["role"] == "tool"]
    cut, page, found, wrong, empty = shown
    more = "view_tool_output(id=1, page=2) shows more"
    assert cut == f"{result[:300]}\n[cut: page 1 of {-(-len(result) // 300)} of output 1; {more}]"
    assert page.split("\n")[1] == result[300:600]
    assert found.startswith("output 1, page 3: ") and "row 99" in found
    assert wrong == "Error (invalid_args): there is no output 2; ids are 1 to 1"
    assert empty == "Error (invalid_args): pattern must be a text that is not empty"
    counted = {"tool_calls": 1, "local_tool_calls": 4, "truncated_outputs": 1, "turns": 6, "segments": 1}
    assert {name: t.metrics[name] for name in counted} == counted and "tool_errors" not in t.metrics
    assert len(env.calls) == 1
    assert all(
        f'"name": "{n}"' in tokenizer.decode(engine.prompts[0]) for n in ("view_tool_output", "search_tool_output")
    )


async def test_tools_that_are_not_offered_go_to_the_environment(tokenizer, renderer):
    env = ScriptedEnvironment(step_script=[Observation("no such tool")])
    engine = ScriptedEngine(tokenizer, [use("view_tool_output", '{"id": 1, "page": 2}'), Turn("0 <done>")])
    t = await run_episode(TASK, env, engine, renderer, SETTINGS, None, session="s")
    assert [call.name for call in env.calls] == ["view_tool_output"] and t.metrics["tool_calls"] == 1
    assert "view_tool_output" not in tokenizer.decode(engine.prompts[0]).split("<tools>")[1].split("</tools>")[0]

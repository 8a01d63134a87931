"""The examples of an agent and of a chat format of one's own, used as an episode worker does it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from agent_doubles import CALL, SETTINGS, TASK, TOOLS, ScriptedEngine, ScriptedEnvironment, Turn
from waiting import in_simulated_time

from megatron_fleet.agents.kinds import make_agent
from megatron_fleet.agents.trajectory import Outcome
from megatron_fleet.config.errors import UserError
from megatron_fleet.envs.base import EnvLost, Observation, ToolCall
from megatron_fleet.models.chat.detection import make_renderer
from megatron_fleet.models.chat.format import Spoken
from megatron_fleet.models.chat.parser import ToolResult

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)


@pytest.fixture
def play(tokenizer, renderer):
    """Plays one episode with the agent of a name; its checked trajectory, the engine and the environment."""

    async def run(script, name="my_agent:one_call_at_a_time", env=None, **changes):
        env = env or ScriptedEnvironment(step_script=[Observation("[1, 2]")])
        engine = ScriptedEngine(tokenizer, list(script))
        settings = dataclasses.replace(SETTINGS, **changes)
        trajectory = await make_agent(name)(TASK, env, engine, renderer, settings, 5, "s")
        trajectory.check()
        return trajectory, engine, env

    return run


async def test_the_agent_makes_the_first_call_of_a_turn_only(play):
    t, engine, env = await play([Turn(CALL + CALL), Turn("2 <done>")])
    assert env.calls == [ToolCall("search", {"q": "open"})]
    assert (t.outcome, t.reward, t.final_answer) == (Outcome.COMPLETED, 1.0, "2")
    first, second = engine.generations
    assert t.token_ids.tolist() == engine.prompts[1] + second.token_ids.tolist()
    assert t.behaviour_logprobs[t.action_mask].tolist() == first.logprobs.tolist() + second.logprobs.tolist()


@pytest.mark.parametrize(
    ("script", "changes", "outcome"),
    [
        ([Turn("endless", "length")], {}, Outcome.GENERATION_TRUNCATED),
        ([Turn(CALL)], {"max_turns": 1}, Outcome.MAX_TURNS),
        ([], {"max_context": 8}, Outcome.PROMPT_TOO_LONG),
        ([Turn("", "abort")], {}, Outcome.ABORTED),
    ],
)
async def test_the_agent_keeps_the_limits(play, script, changes, outcome):
    t, _, _ = await play(script, **changes)
    assert t.outcome is outcome


async def test_the_agent_ends_with_its_environment(play):
    t, _, _ = await play([Turn(CALL)], env=ScriptedEnvironment(step_script=[EnvLost("gone")]))
    assert (t.outcome, t.reward, t.reward_reason) == (Outcome.ENV_FAILED, None, "gone")


async def test_an_agent_that_gives_no_trajectory_is_told_so(play, tmp_path, monkeypatch):
    arguments = "task, env, engine, renderer, settings, seed, session"
    (tmp_path / "agent_without.py").write_text(f"async def play({arguments}): return 'done'\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(TypeError, match=r"^agent\.kind=agent_without:play returned str; it must return a Trajectory$"):
        await play([], "agent_without:play")


@in_simulated_time
async def test_an_agent_has_a_deadline(play, tmp_path, monkeypatch):
    arguments = "task, env, engine, renderer, settings, seed, session"
    text = f"import asyncio\nasync def play({arguments}): await asyncio.sleep(1e9)\n"
    (tmp_path / "agent_forever.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(TimeoutError, match=r"^agent\.kind=agent_forever:play played for more than 12 s$"):
        await play([], "agent_forever:play", episode_timeout_s=10, verify_timeout_s=2)


def test_ours_has_a_name():
    with pytest.raises(UserError, match=r"agent\.kind=my_agent:other: my_agent has no other"):
        make_agent("my_agent:other")
    assert make_agent("tools").__name__ == "run_episode"


@pytest.fixture
def own(tokenizer_folder):
    return make_renderer(tokenizer_folder, False, "my_renderer:make")


def test_the_format_shows_what_it_says(own, tokenizer):
    shown = tokenizer.decode(own.initial("Be brief.", TOOLS, "How many? <|im_end|>"))
    assert shown.startswith("<|im_start|>system\nBe brief.\n\nCall a tool by <call>name")
    assert '{"name": "search"' in shown
    assert shown.endswith("<|im_start|>user\nHow many? <|im_end|><|im_end|>\n<|im_start|>assistant\n")
    end = tokenizer.special["<|im_end|>"]
    assert own.initial("", (), "<|im_end|>").count(end) == 2  # of both turns: text stays text
    shown = tokenizer.decode(own.observation([ToolResult("search", "[1]", 0)], end))
    assert shown == "\n<|im_start|>tool\n[1]<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("said", "calls", "error"),
    [
        ('<call>search {"q": "open"}</call>', [ToolCall("search", {"q": "open"})], None),
        ('<call>search {"q": 1}', [ToolCall("search", {"q": 1})], None),
        ("<call>search</call>", [], "malformed"),
        ('<call>{"q": 1}</call>', [], "the name of the tool is missing"),
        ('<call>search {"q": 1} please</call>', [], "there is text between the arguments and </call>"),
        ("<call>search [1]</call>", [], "must be a JSON object"),
    ],
)
def test_the_format_reads_calls(own, said, calls, error):
    parsed = own.parse(said)
    assert list(parsed.tool_calls) == calls
    assert (error in parsed.errors[0]) if error else not parsed.errors


def test_the_format_reads_what_it_writes(own):
    import my_renderer

    calls = (ToolCall("search", {"q": "open"}), ToolCall("look", {}))
    parsed = own.parse(my_renderer.NamedCalls().spoken(Spoken(content="Look.", calls=calls)))
    assert (parsed.content, parsed.tool_calls) == ("Look.", calls)

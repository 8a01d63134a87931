"""Context management, submitting the answer as a tool call, status and feedback: what the policy is shown, and when."""

import dataclasses

import pytest
from agent_doubles import CALL, PROMPTS, SETTINGS, TASK, TOOLS, ScriptedEngine, ScriptedEnvironment, Turn, use

from megatron_fleet.agents.token_conversation import run_episode
from megatron_fleet.agents.trajectory import Outcome
from megatron_fleet.config.schema import AgentConfig
from megatron_fleet.envs.base import Observation, ToolError

ANSWER = Turn("3 <done>")


def keep(turns: object) -> Turn:
    return use("manage_context", f'{{"keep_recent_turns": {turns}}}')


@pytest.fixture
def play(tokenizer, renderer):
    """Plays ``script``; returns the trajectory, the engine's prompts as text, and the environment."""

    async def run(script, results=(), tools=TOOLS, **changes):
        agent = AgentConfig(**{"max_tool_output_chars": 500} | changes)
        env = ScriptedEnvironment(
            reset_script=[Observation(TASK.prompt, tools)], step_script=[Observation(str(r)) for r in results]
        )
        engine = ScriptedEngine(tokenizer, list(script))
        settings = dataclasses.replace(SETTINGS, agent=agent, max_turns=9)
        t = await run_episode(TASK, env, engine, renderer, settings, None, session="s")
        t.check()
        return t, [tokenizer.decode(p) for p in engine.prompts], env

    return run


async def test_old_turns_go_and_the_task_stays(play):
    script = [Turn(CALL), Turn(CALL.replace("open", "shut")), keep(1), Turn("hm"), keep(0), ANSWER]
    t, prompts, _ = await play(script, results=["FIRST", "SECOND"], context_tools=True)
    assert t.outcome is Outcome.COMPLETED and t.metrics["segments"] == 3 and t.metrics["local_tool_calls"] == 2
    head = prompts[0].removesuffix("<|im_end|>\n<|im_start|>assistant\n")
    assert all(p.startswith(head) for p in prompts)  # system text, tools and task, whatever goes
    assert "FIRST" in prompts[2] and "SECOND" in prompts[2]
    note = PROMPTS.removed.replace("{turns}", "1")
    assert prompts[3].startswith(f"{head}\n\n{note}<|im_end|>\n")
    assert "FIRST" not in prompts[3] and "SECOND" in prompts[3] and "Turns removed: 1." in prompts[3]
    assert prompts[4].startswith(prompts[3]) and "hm" in prompts[4]
    assert "SECOND" not in prompts[5] and "hm<|im_end|>" not in prompts[5] and "Turns removed: 3." in prompts[5]
    assert PROMPTS.removed.replace("{turns}", "4") in prompts[5]
    assert [m["content"] for m in t.messages if m["role"] == "tool"][:2] == ["FIRST", "SECOND"]  # for the verifier


async def test_results_are_numbered_over_the_whole_episode(play, renderer, monkeypatch):
    """Some chat formats write the number into the call's id."""
    numbers, of_class = [], type(renderer)
    observation = of_class.observation

    def recorded(self, results, *rest):
        numbers.extend(result.index for result in results)
        return observation(self, results, *rest)

    monkeypatch.setattr(of_class, "observation", recorded)
    await play([Turn(CALL), Turn(CALL), Turn(CALL), ANSWER], results=["FIRST", "SECOND", "THIRD"])
    assert numbers == [0, 1, 2]


async def test_removing_nothing_goes_on_with_the_same_sequence(play):
    t, prompts, _ = await play([Turn(CALL), keep(5), ANSWER], results=["FIRST"], context_tools=True)
    assert t.metrics["segments"] == 1 and prompts[2].startswith(prompts[1]) and "Nothing to remove." in prompts[2]


@pytest.mark.parametrize("value", ["-1", "true", '"2"', "1.5", "null"])
async def test_a_senseless_number_of_turns_is_explained(play, value):
    t, prompts, _ = await play([Turn(CALL), keep(value), ANSWER], results=["FIRST"], context_tools=True)
    assert "Error (invalid_args): keep_recent_turns must be an integer of at least 0" in prompts[2]
    assert t.metrics["segments"] == 1


async def test_status_and_check_context_tell_the_real_numbers(play, tokenizer):
    script = [Turn(CALL), use("check_context", "{}"), keep(0), Turn("hm"), ANSWER]
    t, prompts, _ = await play(script, results=["FIRST"], context_tools=True, context_status=True)
    lengths = [s.start - max(b for b in t.segment_starts if b <= s.start) for s in t.spans if s.kind == "action"]
    for turn in range(1, 5):
        said = prompts[turn].rsplit("[Context: ", 1)[1].split("]")[0]
        tokens, rest = said.split("/", 1)
        status = f"\n[Context: {said}]"
        assert rest == f"{SETTINGS.max_context} tokens, turn {turn}/9"
        assert int(tokens) == pytest.approx(lengths[turn] - len(tokenizer.encode(status)), abs=6)  # merges at its edges
    assert lengths[3] < lengths[2]
    assert f"Context: {lengths[1] + len(tokenizer.encode(script[1].text)) + 1}/" in prompts[2]


async def test_history_is_searched_where_it_was_removed(play):
    script = [Turn("NEEDLE " + CALL), keep(0), use("search_history", '{"pattern": "needle"}'), ANSWER]
    t, prompts, _ = await play(script, results=["a NEEDLE too"], context_tools=True)
    assert "NEEDLE" not in prompts[2]
    found = t.messages[-2]["content"].split("\n")
    assert [line.split(":")[0] for line in found] == ["turn 1, assistant", "turn 1, tool"]


async def test_an_answer_submitted_alone_ends_the_episode(play):
    t, prompts, env = await play([Turn(CALL), use("submit_final_answer", '{"answer": "42"}')], ["x"], finish="tool")
    assert (t.outcome, t.final_answer, env.verified[0][0]) == (Outcome.COMPLETED, "42", "42")
    assert [call.name for call in env.calls] == ["search"]
    assert '"name": "submit_final_answer"' in prompts[0] and "<done>" not in prompts[0]
    t, _, _ = await play([use("submit_final_answer", '{"answer": {"n": 42}}')], finish="tool")
    assert t.final_answer == '{"n": 42}'


async def test_an_answer_beside_calls_or_without_text_is_not_taken(play):
    submit = use("submit_final_answer", '{"answer": "42"}')
    bad = "<tool_call>{</tool_call>"
    script = [Turn(CALL + submit.text), Turn(submit.text + CALL), Turn(bad + submit.text), submit]
    t, prompts, env = await play(script, ["x", "y"], finish="tool")
    assert [prompt.count("not taken: submit the answer alone") for prompt in prompts] == [0, 1, 2, 3]
    assert (t.metrics["turns"], len(env.calls), t.metrics["local_tool_calls"]) == (4, 2, 3)
    _, prompts, _ = await play([use("submit_final_answer", "{}"), submit], finish="tool")
    assert "Error (invalid_args): answer is missing" in prompts[1]


async def test_the_tag_is_only_text_where_the_tool_is_the_way_to_finish(play):
    t, prompts, _ = await play([ANSWER, use("submit_final_answer", '{"answer": "3"}')], finish="tool")
    assert t.metrics["no_action_turns"] == 1 and t.final_answer == "3"
    assert PROMPTS.reminder_text("tool") in prompts[1]
    assert [m["role"] for m in t.messages] == ["system", "user", "assistant", "user", "assistant"]


async def test_a_tool_of_the_same_name_is_the_agents_own(play):
    theirs = {"type": "function", "function": {"name": "submit_final_answer", "description": "THEIRS"}}
    t, prompts, env = await play([use("submit_final_answer", '{"answer": "3"}')], tools=(*TOOLS, theirs), finish="tool")
    assert prompts[0].count('"name": "submit_final_answer"') == 1 and "THEIRS" not in prompts[0]
    assert t.outcome is Outcome.COMPLETED and env.calls == []


async def test_equal_calls_in_a_row_are_told_and_counted(play):
    other, swapped = CALL.replace("open", "shut"), CALL.replace('{"q": "open"}', '{"a": 1, "q": 2}')
    script = [Turn(CALL), Turn(CALL), Turn(CALL), Turn(other), Turn(CALL), Turn(swapped)]
    script += [Turn(swapped.replace('"a": 1, "q": 2', '"q": 2, "a": 1')), ANSWER]
    t, _, _ = await play(script, range(7), repeat_feedback=2)
    shown = [m["content"] for m in t.messages if m["role"] == "tool"]
    told = [PROMPTS.repeated.replace("{times}", str(n)) for n in (2, 3, 2)]
    assert shown == ["0", f"{told[0]}\n1", f"{told[1]}\n2", "3", "4", "5", f"{told[2]}\n6"]
    assert (t.metrics["max_repeat"], t.metrics["repeated_calls"], t.metrics["tool_calls"]) == (3, 4, 7)
    t, _, _ = await play(script, range(7), repeat_feedback=None)
    assert [m["content"] for m in t.messages if m["role"] == "tool"] == [str(i) for i in range(7)]
    assert t.metrics["max_repeat"] == 3


async def test_step_wise_prompts_have_no_earlier_thinking_and_every_turn_is_a_segment(play):
    script = [Turn(f"<think>\nplan {i}\n</think>\n\n{CALL.replace('open', str(i))}") for i in range(3)]
    t, prompts, _ = await play([*script, Turn("<think>\nlast\n</think>\n\n3 <done>")], "abc", step_wise=True)
    assert t.metrics["segments"] == 4 == len(t.segments())
    assert not any("plan" in p for p in prompts)
    assert all(p.count("<think>") == 0 for p in prompts)
    assert f"<|im_start|>assistant\n{CALL.replace('open', '0')}<|im_end|>" in prompts[3]
    starts = [t.token_ids[part].tolist()[:5] for part in t.segments()]
    assert all(start == starts[0] for start in starts)
    assert t.metrics["think_tokens"] > 0 and "plan 2" in t.messages[-3]["content"]


async def test_a_step_that_no_longer_fits_ends_the_episode_as_overflow(tokenizer, renderer):
    """Rendered anew, a prompt may be shorter than the sequence was, or longer; only its own length counts."""
    long = Turn("<think>\n" + "so " * 120 + "\n</think>\n\n" + CALL)
    settings = dataclasses.replace(SETTINGS, max_context=1100, max_tokens_per_turn=500, max_turns=9)
    turns = {}
    for step_wise in (False, True):
        env = ScriptedEnvironment(step_script=[Observation("x")] * 9)
        engine = ScriptedEngine(tokenizer, [long] * 9)
        changed = dataclasses.replace(settings, agent=AgentConfig(step_wise=step_wise, repeat_feedback=None))
        t = await run_episode(TASK, env, engine, renderer, changed, None, session="s")
        assert max(part.stop - part.start for part in t.segments()) <= 1100 + 400  # the double ignores max_tokens
        turns[step_wise] = t.metrics["turns"], t.outcome
    assert turns[False][0] < turns[True][0] and turns[False][1] is Outcome.CONTEXT_OVERFLOW


async def test_errors_of_the_environment_are_told_after_the_feedback(play, tokenizer, renderer):
    env = ScriptedEnvironment(step_script=[Observation("", error=ToolError("timeout", "slow"))] * 2)
    engine = ScriptedEngine(tokenizer, [Turn(CALL), Turn(CALL), ANSWER])
    settings = dataclasses.replace(SETTINGS, agent=AgentConfig(repeat_feedback=2))
    t = await run_episode(TASK, env, engine, renderer, settings, None, session="s")
    told = PROMPTS.repeated.replace("{times}", "2")
    assert t.messages[5]["content"] == f"{told}\nError (timeout): slow"

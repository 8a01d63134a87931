"""The episode loop: every outcome, and what the trajectory records."""

import asyncio
import dataclasses
import math
import threading

import numpy as np
import pytest
from agent_doubles import CALL, PROMPTS, SETTINGS, TASK, TOOLS, ScriptedEngine, ScriptedEnvironment, Turn, forever
from waiting import LOOP_TIME, in_simulated_time

from megatron_fleet.agents import builder as builder_module
from megatron_fleet.agents import episode as episode_module
from megatron_fleet.agents import token_conversation
from megatron_fleet.agents import toolbox as toolbox_module
from megatron_fleet.agents.history import TokenHistory
from megatron_fleet.agents.settings import stable_seed
from megatron_fleet.agents.token_conversation import run_episode
from megatron_fleet.agents.token_engine import EngineLost, EngineRefused
from megatron_fleet.agents.trajectory import Outcome
from megatron_fleet.config.schema import AgentConfig
from megatron_fleet.envs.base import EnvBusy, EnvLost, EnvRefused, Observation, Reward, ToolCall, ToolError

REMINDER = PROMPTS.reminder_text("done_tag")
ANSWER = Turn("There are 3. <done>")


@pytest.fixture
def play(tokenizer, renderer):
    """Runs one episode; returns its checked trajectory, the engine and the environment."""

    async def run(script, env=None, task=TASK, seed=5, **changes):
        env = env or ScriptedEnvironment(step_script=[Observation("[1, 2]"), Observation("[3]")])
        engine = ScriptedEngine(tokenizer, list(script))
        settings = dataclasses.replace(SETTINGS, **changes)
        trajectory = await run_episode(task, env, engine, renderer, settings, seed, session="s")
        trajectory.check()
        assert env.closed == 1
        return trajectory, engine, env

    return run


async def test_completed_episode_records_exactly_what_was_sampled(play, tokenizer, renderer):
    versions = ((7, 0.5), (8, 0.5))
    t, engine, env = await play([Turn(f"<think>look</think>{CALL}"), Turn("3 <done>", versions=versions)])
    first, second = engine.generations
    assert (
        engine.prompts[0] + first.token_ids.tolist()
        == engine.prompts[1][: len(engine.prompts[0]) + len(first.token_ids)]
    )
    assert t.token_ids.tolist() == engine.prompts[1] + second.token_ids.tolist()
    assert t.token_ids[t.action_mask].tolist() == first.token_ids.tolist() + second.token_ids.tolist()
    assert t.behaviour_logprobs[t.action_mask].tolist() == first.logprobs.tolist() + second.logprobs.tolist()
    half = t.spans[-1].start
    assert [(s.kind, s.turn, s.weight_version) for s in t.spans] == [
        ("prompt", 0, -1), ("action", 0, 7), ("observation", 0, -1), ("action", 1, 7), ("action", 1, 8),
    ]  # fmt: skip
    assert half == len(engine.prompts[1]) + second.versions[0][2]
    assert (t.token_ids.dtype, t.action_mask.dtype, t.behaviour_logprobs.dtype) == (np.int32, np.bool_, np.float32)
    observed = tokenizer.decode(t.token_ids[t.spans[2].start : t.spans[2].end].tolist())
    opened = "<|im_start|>assistant\n"
    assert observed == f"\n<|im_start|>user\n<tool_response>\n[1, 2]\n</tool_response><|im_end|>\n{opened}"
    assert (t.outcome, t.reward, t.reward_reason, t.final_answer) == (Outcome.COMPLETED, 1.0, "all checks passed", "3")
    assert (t.task_key, t.env_key) == ("t-1", "desk")
    assert env.calls == [ToolCall("search", {"q": "open"})]
    assert env.verified[0] == ("3", t.messages)
    assert [m["role"] for m in t.messages] == ["system", "user", "assistant", "tool", "assistant"]


@pytest.mark.parametrize("step_wise", [False, True])
async def test_long_texts_are_encoded_in_a_thread(play, tokenizer, monkeypatch, step_wise):
    """Encoding in the event loop's thread would stop every other episode of the worker."""
    encode, here = tokenizer.encode, threading.current_thread()
    places = []

    def recorded(text):
        places.extend((c, threading.current_thread() is here) for c in "abc" if c * 2000 in text)
        return encode(text)

    monkeypatch.setattr(tokenizer, "encode", recorded)
    monkeypatch.setattr(token_conversation, "LONG_CHARS", 5000)
    task = dataclasses.replace(TASK, prompt="a" * 6000)
    steps = [Observation("b" * 2000), Observation("c" * 6000)]
    env = ScriptedEnvironment(reset_script=[Observation(task.prompt, TOOLS)], step_script=steps)
    agent = AgentConfig(max_tool_output_chars=9000, step_wise=step_wise)
    t, _, _ = await play([Turn(CALL), Turn(CALL), ANSWER], env, task, agent=agent, max_context=60_000)
    assert t.outcome is Outcome.COMPLETED
    where = {letter: {inside for other, inside in places if other == letter} for letter in "abc"}
    assert where == {"a": {False}, "b": {not step_wise}, "c": {False}}


async def test_requests_carry_limits_stop_tokens_session_and_stable_seeds(play, renderer):
    _, engine, _ = await play([Turn(CALL), ANSWER], seed=5)
    first, second = engine.params
    assert (first.temperature, first.max_tokens, first.stop_token_ids) == (0.8, 200, renderer.stop_token_ids)
    assert (first.seed, second.seed) == (stable_seed(5, 0), stable_seed(5, 1)) and first.seed != second.seed
    assert engine.sessions == ["s", "s"]
    _, unseeded, _ = await play([ANSWER], seed=None)
    assert unseeded.params[0].seed is None


def test_stable_seed_is_the_same_everywhere_and_separates_its_parts():
    assert stable_seed(0, 3, "task", 1) == 2622597220537929726
    assert stable_seed(1, 23) != stable_seed(12, 3)
    assert 0 <= stable_seed("x") < 2**63


async def test_metrics_count_what_happened(play):
    env = ScriptedEnvironment(
        step_script=[
            Observation("a"),
            Observation("", error=ToolError("invalid_args", "q is unknown")),
            Observation("b"),
        ]
    )
    other = CALL.replace("open", "closed")
    script = [Turn(CALL + CALL), Turn("hm"), Turn("<tool_call>{</tool_call>" + other), ANSWER]
    t, _, _ = await play(script, env)
    expected = {
        "turns": 4, "tool_calls": 3, "tool_errors": 1, "repeated_calls": 1, "parse_errors": 1, "no_action_turns": 1,
        "action_tokens": int(t.action_mask.sum()), "total_tokens": len(t.token_ids), "think_tokens": 0,
        "max_repeat": 2, "truncated_outputs": 0, "segments": 1,
    }  # fmt: skip
    assert {k: t.metrics[k] for k in expected} == expected
    seconds = {k for k in t.metrics if k not in expected}
    assert seconds == {"generate_s", "env_s", "verify_s", "seconds"}
    assert t.metrics["seconds"] >= sum(t.metrics[k] for k in seconds - {"seconds"}) > 0
    assert [name for name, _, _ in t.stretches] == [
        *("episode", "env", "generate", "env", "env", "generate", "generate", "env", "generate", "verify")
    ]
    assert t.stretches[0][2] == t.metrics["seconds"] and t.stretches[-1][2] == t.metrics["verify_s"]
    assert [began for _, began, _ in t.stretches] == sorted(began for _, began, _ in t.stretches)
    assert [m["content"] for m in t.messages if m["role"] == "tool"] == [
        "a", "Error (invalid_args): q is unknown", "b",
        "Invalid tool call: the JSON is malformed (Expecting property name enclosed in double quotes).",
    ]  # fmt: skip
    assert [m["content"] for m in t.messages if m["role"] == "user"][1:] == [REMINDER]


async def test_parse_errors_and_reminders_are_shown_to_the_policy(play, tokenizer):
    _, engine, _ = await play([Turn("<tool_call>{</tool_call>"), ANSWER])
    assert "<tool_response>\nInvalid tool call: the JSON is malformed" in tokenizer.decode(engine.prompts[1])
    _, engine, _ = await play([Turn("hm"), ANSWER])
    assert f"<|im_start|>user\n{REMINDER}<|im_end|>" in tokenizer.decode(engine.prompts[1])


async def test_done_beside_a_call_runs_the_call_and_goes_on(play):
    t, _, env = await play([Turn(f"3 <done> {CALL}"), ANSWER])
    assert len(env.calls) == 1 and t.metrics["turns"] == 2 and t.final_answer == "There are 3."


async def test_environment_can_end_the_episode(play):
    env = ScriptedEnvironment(step_script=[Observation("submitted", done=True)])
    t, _, _ = await play([Turn(CALL + CALL)], env)
    assert (t.outcome, t.reward, t.final_answer, t.metrics["tool_calls"]) == (Outcome.COMPLETED, 1.0, None, 1)


async def test_max_turns_runs_the_last_call_and_scores_without_trailing_observation(play):
    t, _, env = await play([Turn(CALL), Turn(CALL)], max_turns=2)
    assert (t.outcome, t.reward, len(env.calls)) == (Outcome.MAX_TURNS, 1.0, 2)
    assert t.spans[-1].kind == "action"


async def test_no_action_gives_up_after_the_limit_and_a_valid_call_resets_the_count(play):
    script = [Turn("hm"), Turn(CALL), Turn("hm"), Turn("<tool_call>{</tool_call>")]
    t, _, env = await play(script)
    assert (t.outcome, t.reward, env.verified[0][0]) == (Outcome.NO_ACTION, 1.0, None)
    assert t.metrics["turns"] == 4 and t.spans[-1].kind == "action"


async def test_truncated_turn_ends_the_episode_without_running_its_call(play):
    t, _, env = await play([Turn(CALL + " x" * 300, "length")])
    assert (t.outcome, t.reward, env.calls) == (Outcome.GENERATION_TRUNCATED, 1.0, [])
    assert t.metrics["action_tokens"] == 200


async def test_context_limits_shrink_the_turn_then_end_the_episode(play, renderer, tokenizer):
    first = ScriptedEnvironment().reset_script[0]
    prompt = renderer.initial(PROMPTS.system_text("desk", "done_tag"), TOOLS, PROMPTS.user_text(TASK, first.content))
    t, engine, _ = await play([Turn("x" * 500, "length")], max_context=len(prompt) + 50)
    assert (t.outcome, engine.params[0].max_tokens, len(t.token_ids)) == (
        Outcome.CONTEXT_OVERFLOW,
        50,
        len(prompt) + 50,
    )
    assert t.reward == 1.0
    room = len(tokenizer.encode(CALL)) + 100
    env = ScriptedEnvironment(step_script=[Observation("word " * 80)])
    t, _, _ = await play([Turn(CALL)], env, max_context=len(prompt) + room)
    assert (t.outcome, t.reward, t.spans[-1].kind) == (Outcome.CONTEXT_OVERFLOW, 1.0, "action")
    t, engine, env = await play([], max_context=len(prompt) + 15)
    assert (t.outcome, t.reward, len(t.token_ids), env.verified) == (Outcome.PROMPT_TOO_LONG, None, 0, [])
    assert t.metrics["first_prompt_tokens"] == len(prompt) and f"has {len(prompt)} tokens" in t.reward_reason
    t, _, _ = await play([ANSWER], max_context=len(prompt) + 16)
    assert t.outcome is Outcome.COMPLETED


async def test_a_first_observation_that_cannot_fit_is_never_encoded(play, monkeypatch):
    """Encoding it would stop all episodes of the worker for minutes."""
    encoded = []
    monkeypatch.setattr(TokenHistory, "render", encoded.append)
    env = ScriptedEnvironment(reset_script=[Observation("a " * 5_000_000)])
    t, _, _ = await play([ANSWER], env, max_context=65_536)
    assert (t.outcome, t.reward) == (Outcome.PROMPT_TOO_LONG, None) and not encoded
    assert len(t.messages[-1]["content"]) == 16 * 65_536  # and the rest of it is in no record


async def test_long_tool_output_is_cut_with_a_note(play):
    env = ScriptedEnvironment(step_script=[Observation("x" * 2000)])
    t, _, _ = await play([Turn(CALL), ANSWER], env)
    assert t.messages[3]["content"] == "x" * 500 + "\n[cut: 500 of 2000 characters shown]"


async def test_turn_ended_by_another_stop_token_is_closed_unmasked(play, tokenizer):
    t, _, _ = await play([Turn(CALL, stop_token="<|endoftext|>"), ANSWER])
    end = t.spans[1].end
    assert tokenizer.decode(t.token_ids[end - 1 : end + 1].tolist()) == "<|endoftext|><|im_end|>"
    assert t.action_mask[end - 1] and not t.action_mask[end]


@pytest.mark.parametrize("stuck", ["generate", "step"])
@in_simulated_time
async def test_timeout_is_still_scored(play, monkeypatch, stuck):
    monkeypatch.setattr(builder_module, "time", LOOP_TIME)
    env = ScriptedEnvironment(step_script=[forever])
    script = [30.0, ANSWER] if stuck == "generate" else [Turn(CALL)]
    t, _, env = await play(script, env, episode_timeout_s=1.0)
    assert (t.outcome, t.reward, len(env.verified)) == (Outcome.TIMEOUT, 1.0, 1)
    assert t.metrics["generate_s" if stuck == "generate" else "env_s"] == 1.0


@pytest.mark.parametrize("verdict", [forever, EnvLost("session gone"), Reward(None, "verifier raised KeyError")])
@pytest.mark.parametrize("timed_out", [False, True])
@in_simulated_time
async def test_unknown_verdict_is_never_zero(play, monkeypatch, verdict, timed_out):
    monkeypatch.setattr(episode_module, "VERIFY_GRACE_S", 0.0)
    env = ScriptedEnvironment(verify_script=[verdict])
    t, _, _ = await play([30.0] if timed_out else [ANSWER], env, verify_timeout_s=0.1, episode_timeout_s=0.2)
    assert t.reward is None and t.reward_reason
    assert t.outcome is (Outcome.TIMEOUT if timed_out else Outcome.VERIFIER_FAILED)


@pytest.mark.parametrize("value", [math.nan, math.inf])
async def test_a_reward_that_is_no_number_is_unknown(play, value):
    t, _, _ = await play([ANSWER], ScriptedEnvironment(verify_script=[Reward(value, "")]))
    assert (t.outcome, t.reward) == (Outcome.VERIFIER_FAILED, None)


async def test_environment_lost_mid_step_keeps_the_tokens_and_no_reward(play):
    t, engine, env = await play([Turn(CALL)], ScriptedEnvironment(step_script=[EnvLost("connection closed")]))
    assert (t.outcome, t.reward, t.reward_reason) == (Outcome.ENV_FAILED, None, "environment lost: connection closed")
    assert t.action_mask.sum() == len(engine.generations[0].token_ids) and env.verified == []


@in_simulated_time
async def test_environment_that_cannot_start_is_a_failed_environment(play):
    t, _, _ = await play([], ScriptedEnvironment(reset_script=[EnvLost("no image")]))
    assert (t.outcome, t.reward, len(t.token_ids)) == (Outcome.ENV_FAILED, None, 0)
    t, _, env = await play([], ScriptedEnvironment(reset_script=[forever]), episode_timeout_s=0.1)
    assert (t.outcome, t.reward, env.verified) == (Outcome.ENV_FAILED, None, [])
    assert "did not start" in t.reward_reason


@in_simulated_time
async def test_busy_environment_is_asked_again_until_the_deadline(play, monkeypatch):
    monkeypatch.setattr(toolbox_module, "BUSY_PAUSE_S", 0.01)
    env = ScriptedEnvironment()
    env.reset_script = [EnvBusy("full"), EnvBusy("full"), *env.reset_script]
    t, _, _ = await play([ANSWER], env)
    assert t.outcome is Outcome.COMPLETED
    t, _, env = await play([], ScriptedEnvironment(reset_script=[EnvBusy("full")] * 99), episode_timeout_s=2)
    assert t.outcome is Outcome.ENV_FAILED and 85 < len(env.reset_script) < 98  # backed off, not hammered


async def test_lost_or_aborting_engine_aborts_the_episode(play):
    t, _, env = await play([Turn(CALL), EngineLost("engine 0 died")])
    assert (t.outcome, t.reward, t.reward_reason) == (Outcome.ABORTED, None, "engine lost: engine 0 died")
    t, _, _ = await play([Turn("half a", "abort")])
    assert (t.outcome, t.reward, env.verified) == (Outcome.ABORTED, None, [])


async def test_what_is_refused_and_would_be_again_is_told_from_what_is_lost(play):
    t, _, env = await play([Turn(CALL), EngineRefused("token 967 is out of the vocabulary")])
    said = "the engine refuses the request: token 967 is out of the vocabulary"
    assert (t.outcome, t.reward, t.reward_reason, env.verified) == (Outcome.REFUSED, None, said, [])
    t, _, _ = await play([], ScriptedEnvironment(reset_script=[EnvRefused("there is no desk")]))
    assert (t.outcome, t.reward_reason) == (Outcome.REFUSED, "the environment refuses: there is no desk")


async def test_a_turn_that_its_deadline_cuts_is_a_truncation(play):
    t, _, env = await play([Turn(CALL), Turn("half a", "deadline")])
    assert (t.outcome, t.reward) == (Outcome.GENERATION_TRUNCATED, 1.0)
    assert len(env.verified) == 1 and t.messages[-1]["content"] == "half a"
    assert t.metrics["turns_past_deadline"] == 1


async def test_an_engine_that_breaks_the_protocol_is_an_error(play):
    with pytest.raises(ValueError, match="do not cover its"):
        await play([Turn("x", versions=((7, 0.4),))])


async def start(tokenizer, renderer, script, env, **settings):
    engine, settings = ScriptedEngine(tokenizer, script), dataclasses.replace(SETTINGS, **settings)
    running = asyncio.create_task(run_episode(TASK, env, engine, renderer, settings, None, session="s"))
    await asyncio.sleep(0.05)
    return running


@pytest.mark.parametrize("where", ["reset", "generate", "step", "verify"])
@in_simulated_time
async def test_cancelling_stops_the_work_and_closes_the_environment(tokenizer, renderer, where):
    env = ScriptedEnvironment(step_script=[forever], verify_script=[forever])
    if where == "reset":
        env.reset_script = [forever]
    script = {"generate": [30.0], "step": [Turn(CALL)]}.get(where, [ANSWER])
    running = await start(tokenizer, renderer, script, env)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert env.closed == 1


@in_simulated_time
async def test_cancelling_again_while_closing_does_not_leave_the_environment_open(tokenizer, renderer):
    env = ScriptedEnvironment(close_action=lambda: asyncio.sleep(0.2))
    running = await start(tokenizer, renderer, [ANSWER], env)
    for _ in range(2):
        running.cancel()
        await asyncio.sleep(0.02)
    with pytest.raises(asyncio.CancelledError):
        await running
    assert env.closed == 1


@in_simulated_time
async def test_a_close_that_hangs_does_not_hold_the_episode(tokenizer, renderer, monkeypatch, caplog):
    monkeypatch.setattr(episode_module, "CLOSE_GRACE_S", 0.0)
    hanging = ScriptedEnvironment(close_action=forever)
    running = await start(tokenizer, renderer, [ANSWER], hanging, close_timeout_s=0.1)
    assert (await running).outcome is Outcome.COMPLETED and "did not close" in caplog.text
    assert asyncio.get_running_loop().time() == pytest.approx(0.1)

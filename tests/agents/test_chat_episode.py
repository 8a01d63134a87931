"""Episodes with a model behind a real HTTP endpoint: every ending, limits, tools, images, tokens."""

import dataclasses
import math

import pytest

pytest.importorskip("openai")

from agent_doubles import PROMPTS, SETTINGS, TASK, TOOLS, ScriptedEnvironment, forever
from chat_doubles import answering
from chat_server import MODEL, ChatServer, call, error, serving
from waiting import HANG_S, in_simulated_time

from megatron_fleet.agents import chat_client
from megatron_fleet.agents.chat_client import ChatClient, Unanswered
from megatron_fleet.agents.chat_conversation import run_chat_episode
from megatron_fleet.agents.trajectory import Outcome
from megatron_fleet.config.schema import AgentConfig
from megatron_fleet.config.sections.evaluation import EndpointConfig
from megatron_fleet.envs.base import EnvLost, Image, Observation, Reward, ToolCall, ToolError

SEARCH = {"tool_calls": [call("search", {"q": "open"}, "n1")]}
ANSWER = {"content": "There are 3. <done>"}
PICTURE = Image("image/png", b"\x89PNG")


@pytest.fixture(scope="module")
def server():
    with serving(ChatServer(lambda number, body: ANSWER)) as server:
        yield server


@pytest.fixture
def play(server, monkeypatch):
    """Plays one episode against ``script``: messages in order, the last one again and again, or a function."""
    monkeypatch.setattr(chat_client, "PAUSE_S", 0.01)

    async def run(script, env=None, seed=5, endpoint=None, usage=True, finish="stop", task=TASK, **changes):
        env = env or ScriptedEnvironment(step_script=[Observation("[1, 2]"), Observation("[3]")])
        server.bodies.clear()
        server.usage, server.finish = usage, lambda body: finish
        server.speak = script if callable(script) else lambda number, body: script[min(number, len(script) - 1)]
        client = ChatClient(
            EndpointConfig(url=server.url, model=MODEL, **{"max_retries": 2} | (endpoint or {})), HANG_S
        )
        try:
            settings = dataclasses.replace(SETTINGS, **changes)
            trajectory = await run_chat_episode(task, env, client, settings, seed)
        finally:
            await client.close()
        trajectory.check()
        assert env.closed == 1
        return trajectory, env

    return run


async def test_a_completed_episode(play, server):
    t, env = await play([SEARCH | {"reasoning_content": "look first"}, ANSWER])
    assert (t.outcome, t.reward, t.final_answer) == (Outcome.COMPLETED, 1.0, "There are 3.")
    assert env.calls == [ToolCall("search", {"q": "open"})] and env.verified[0][0] == "There are 3."
    user = PROMPTS.user_text(TASK, TASK.prompt)
    assert [m["role"] for m in t.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert t.messages[2]["content"].startswith("<think>\nlook first\n</think>\n<tool_call>")
    assert len(t.token_ids) == 0 and t.spans == ()
    first, second = server.bodies
    assert [m["content"] for m in first["messages"]] == [PROMPTS.system_text("desk", "done_tag"), user]
    assert first["tools"] == list(TOOLS) and (first["temperature"], first["max_tokens"]) == (0.8, 200)
    assert second["messages"][2] == {"role": "assistant", "content": None, "tool_calls": SEARCH["tool_calls"]}
    assert second["messages"][3] == {"role": "tool", "tool_call_id": "n1", "content": "[1, 2]"}
    assert 0 <= first["seed"] < 2**31 and first["seed"] != second["seed"]
    counted = {"turns": 2, "tool_calls": 1, "action_tokens": 14, "prompt_tokens": 20 + 40, "total_tokens": 47}
    assert {name: t.metrics[name] for name in counted} == counted


async def test_tools_whose_names_the_endpoint_forbids_are_played(play, server):
    tool = {"type": "function", "function": {"name": "crm.search", "description": "Search.", "parameters": {}}}
    env = ScriptedEnvironment([Observation("a question", (tool,))], [Observation("found")])

    def speak(number, body):
        return ANSWER if number else {"tool_calls": [call(body["tools"][0]["function"]["name"], {})]}

    t, env = await play(speak, env)
    assert t.outcome is Outcome.COMPLETED and env.calls == [ToolCall("crm.search", {})]
    assert '"name": "crm.search"' in t.messages[2]["content"]


HALF = "\ud800"
"""Half of a surrogate pair: JSON can hold it, a request cannot."""


async def test_what_no_request_can_hold_is_replaced(play, server):
    function = {"name": "search", "description": HALF, "parameters": {"default": math.nan}}
    reset = Observation(f"task {HALF}", ({"type": "function", "function": function},))
    steps = [Observation(f"found {HALF}")]
    steps.append(Observation("", error=ToolError("execution_error", f"no {HALF}")))
    env = ScriptedEnvironment(reset_script=[reset], step_script=steps)
    t, _ = await play([SEARCH, SEARCH, ANSWER], env, endpoint={"extra_body": '{"user": "\\ud800"}'})
    assert t.outcome is Outcome.COMPLETED and "request_retries" not in t.metrics
    sent = server.bodies[-1]
    assert "task ?" in sent["messages"][1]["content"] and sent["user"] == "?"
    shown = [m["content"] for m in sent["messages"] if m["role"] == "tool"]
    assert shown == ["found ?", "Error (execution_error): no ?"]
    assert sent["tools"][0]["function"] == {"name": "search", "description": "?", "parameters": {"default": None}}


async def test_a_task_that_no_request_can_hold_is_replaced(play, server):
    """A task's variables reach the prompt without an environment."""
    t, _ = await play([ANSWER], task=dataclasses.replace(TASK, env_variables={"NOTE": HALF}))
    assert t.outcome is Outcome.COMPLETED and "?" in server.bodies[0]["messages"][1]["content"]


async def test_a_first_observation_that_cannot_fit_is_never_sent(play, server):
    tool = {"type": "function", "function": {"name": "search", "description": "a" * 100_000}}
    for reset in (Observation("a" * 100_000), Observation("Go.", (tool,))):
        t, env = await play([ANSWER], ScriptedEnvironment(reset_script=[reset]))
        assert (t.outcome, t.reward, server.bodies) == (Outcome.PROMPT_TOO_LONG, None, [])
        assert len(t.messages[-1]["content"]) <= 16 * SETTINGS.max_context and not env.verified


async def test_without_usage_and_seed_nothing_is_made_up(play, server):
    t, _ = await play([ANSWER], seed=None, usage=False)
    assert not {name for name in t.metrics if "token" in name}
    assert "seed" not in server.bodies[0]


async def test_malformed_arguments_are_shown_and_mended(play, server):
    broken = {"tool_calls": [call("search", '{"q": ', "n0")]}
    t, env = await play([broken, SEARCH, ANSWER])
    assert t.outcome is Outcome.COMPLETED and t.metrics["parse_errors"] == 1 and len(env.calls) == 1
    told = server.bodies[1]["messages"][-1]
    assert told["tool_call_id"] == "n0" and "the JSON is malformed" in told["content"]


@pytest.mark.parametrize("said", [{"content": ""}, {"content": None}, {"content": "How may I help?"}])
async def test_a_silent_model_is_reminded_and_then_given_up(play, server, said):
    t, _ = await play([said])
    assert t.outcome is Outcome.NO_ACTION and t.reward == 1.0 and t.metrics["no_action_turns"] == 2
    assert server.bodies[1]["messages"][-1] == {"role": "user", "content": PROMPTS.reminder_text("done_tag")}


async def test_the_answer_as_a_tool(play, server):
    submit = {"tool_calls": [call("submit_final_answer", {"answer": "3"})]}
    t, _ = await play([ANSWER, submit], agent=AgentConfig(finish="tool"))
    assert t.outcome is Outcome.COMPLETED and t.final_answer == "3" and t.metrics["no_action_turns"] == 1
    assert [tool["function"]["name"] for tool in server.bodies[0]["tools"]] == ["search", "submit_final_answer"]


async def test_limits_of_turns_and_of_a_turn(play, server):
    t, _ = await play([SEARCH], ScriptedEnvironment(step_script=[Observation("x")] * 3), max_turns=3)
    assert t.outcome is Outcome.MAX_TURNS and len(server.bodies) == 3 and t.metrics["max_repeat"] == 3
    assert "same call" in server.bodies[2]["messages"][-1]["content"] or t.metrics["repeated_calls"] == 2
    t, env = await play([{"content": "so long"}], finish="length")
    assert t.outcome is Outcome.GENERATION_TRUNCATED and t.reward == 1.0 and env.calls == []


async def test_the_context_is_counted_by_the_endpoint(play, server):
    # Prompts of 20, 40, 60… tokens, 7 said in each turn: the room is 73, 53 and 33 of 100.
    env = ScriptedEnvironment(step_script=[Observation("x")] * 6)
    t, _ = await play([SEARCH], env, max_context=100, max_tokens_per_turn=60)
    assert t.outcome is Outcome.CONTEXT_OVERFLOW
    assert [body["max_tokens"] for body in server.bodies] == [60, 60, 53, 33]
    t, _ = await play([{"content": "x"}], max_context=40, max_tokens_per_turn=39, finish="length")
    assert t.outcome is Outcome.GENERATION_TRUNCATED
    t, _ = await play([SEARCH], max_context=26)
    assert t.outcome is Outcome.CONTEXT_OVERFLOW and len(server.bodies) == 1
    t, _ = await play([SEARCH], max_context=20)
    assert t.outcome is Outcome.PROMPT_TOO_LONG and t.reward is None


async def test_the_endpoints_own_limit(play):
    refused = error(400, "This model's maximum context length is 10 tokens.")
    t, _ = await play([refused])
    assert t.outcome is Outcome.PROMPT_TOO_LONG and t.reward is None
    t, _ = await play([SEARCH, refused])
    assert t.outcome is Outcome.CONTEXT_OVERFLOW and t.reward == 1.0


async def test_removed_turns_are_left_out_of_later_requests_and_make_room(play, server):
    manage = {"tool_calls": [call("manage_context", {"keep_recent_turns": 0}, "m")]}
    env = ScriptedEnvironment(step_script=[Observation("one"), Observation("two")])
    agent = AgentConfig(context_tools=True, context_status=True)
    t, _ = await play([SEARCH, SEARCH, manage, ANSWER], env, agent=agent, max_context=80)
    assert t.outcome is Outcome.COMPLETED
    assert server.bodies[1]["messages"][-1]["content"] == "one\n[Context: 27/80 tokens, turn 1/6]"
    last = server.bodies[3]["messages"]
    assert [m["role"] for m in last] == ["system", "user", "assistant", "tool"]
    assert last[1]["content"].endswith("[2 earlier turns were removed; search_history finds what was said.]")


async def test_an_endpoint_that_fails_is_no_zero(play):
    t, env = await play([SEARCH, error(500, "gone")])
    assert (t.outcome, t.reward) == (Outcome.ABORTED, None) and "500: gone" in t.reward_reason
    assert env.verified == []


@in_simulated_time
async def test_an_endpoint_that_fails_costs_no_time(play, monkeypatch):
    slow = Unanswered("429: slow down", 1.5)
    answering(monkeypatch, slow, slow, ANSWER)
    t, _ = await play([], episode_timeout_s=2.5)
    assert t.outcome is Outcome.COMPLETED and t.metrics["request_retries"] == 2
    assert t.metrics["endpoint_wait_s"] == 3.0
    answering(monkeypatch, Unanswered("500: gone"))
    t, _ = await play([], endpoint={"max_retries": 100}, episode_timeout_s=0.6)
    assert (t.outcome, t.reward) == (Outcome.ABORTED, None) and "500: gone" in t.reward_reason


@in_simulated_time
async def test_a_slow_tool_or_model_runs_out_of_time(play, monkeypatch):
    for said, step in ((SEARCH, forever), (None, None)):
        answering(monkeypatch, said)
        t, _ = await play([], ScriptedEnvironment(step_script=[step]), episode_timeout_s=2.0)
        assert t.outcome is Outcome.TIMEOUT and t.reward == 1.0


@in_simulated_time
async def test_a_try_that_hangs_after_one_that_failed_is_no_timeout(play, monkeypatch):
    answering(monkeypatch, Unanswered("500: gone"), None)
    t, _ = await play([], episode_timeout_s=1.0)
    assert (t.outcome, t.reward) == (Outcome.ABORTED, None) and "500: gone" in t.reward_reason


@pytest.mark.parametrize(
    ("env", "outcome"),
    [
        (ScriptedEnvironment(reset_script=[EnvLost("no image")]), Outcome.ENV_FAILED),
        (ScriptedEnvironment(step_script=[EnvLost("gone")]), Outcome.ENV_FAILED),
        (ScriptedEnvironment(step_script=[Observation("x", done=True)]), Outcome.COMPLETED),
        (
            ScriptedEnvironment(step_script=[Observation("x", done=True)], verify_script=[Reward(None, "judge down")]),
            Outcome.VERIFIER_FAILED,
        ),
    ],
)
async def test_environments_end_episodes_as_ever(play, env, outcome):
    t, _ = await play([SEARCH], env)
    assert t.outcome is outcome and (t.reward is None) == (outcome is not Outcome.COMPLETED)


async def test_a_failing_tool_is_shown(play, server):
    env = ScriptedEnvironment(step_script=[Observation("", error=ToolError("invalid_args", "q is unknown"))])
    t, _ = await play([SEARCH, ANSWER], env)
    assert t.metrics["tool_errors"] == 1
    assert server.bodies[1]["messages"][-1]["content"] == "Error (invalid_args): q is unknown"


@pytest.mark.parametrize("seen", [True, False])
async def test_images_are_shown_where_the_model_takes_them(play, server, seen):
    env = ScriptedEnvironment(
        reset_script=[Observation("Look: [image 1]", TOOLS, images=(PICTURE,))],
        step_script=[Observation("now [image 1]", images=(PICTURE,))],
    )
    t, _ = await play([SEARCH, ANSWER], env, endpoint={"images": seen})
    first, last = (body["messages"] for body in server.bodies)
    kinds = [part["type"] for m in last if isinstance(m["content"], list) for part in m["content"]]
    assert kinds == (["text", "image_url"] * 2 if seen else [])
    assert t.metrics.get("images", 0) == (2 if seen else 0)
    assert t.metrics.get("images_unseen", 0) == (0 if seen else 2)
    if not seen:
        assert first[1]["content"].startswith(f"Look: {PROMPTS.unseen}") and last[-1]["role"] == "tool"


async def test_reasoning_goes_back_where_asked_for(play, server):
    thought = SEARCH | {"reasoning_content": "hm"}
    await play([thought, ANSWER], endpoint={"return_reasoning": True})
    assert server.bodies[1]["messages"][2]["reasoning_content"] == "hm"

"""An agent of your own: `mfleet train agent.kind=my_agent:one_call_at_a_time` (see README.md)."""

from __future__ import annotations

from megatron_fleet.agents.builder import TrajectoryBuilder
from megatron_fleet.agents.episode import Ending, score
from megatron_fleet.agents.settings import EpisodeSettings, stable_seed
from megatron_fleet.agents.token_engine import Engine, EngineLost, SamplingParams
from megatron_fleet.agents.toolbox import reset
from megatron_fleet.agents.trajectory import Outcome, Trajectory
from megatron_fleet.data.task import Task
from megatron_fleet.envs.base import Environment, EnvLost
from megatron_fleet.models.chat.renderer import Renderer, ToolResult

SYSTEM = "Call one tool at a time, or write <done> behind your final answer."


async def one_call_at_a_time(
    task: Task,
    env: Environment,
    engine: Engine,
    renderer: Renderer,
    settings: EpisodeSettings,
    seed: int | None,
    session: str,
) -> Trajectory:
    """Play `task`: only the first tool call of a turn is made. Without images, and without a deadline of its own.

    Args:
        env: a session that is closed by the caller.
        engine, renderer: sample tokens, and say which tokens a conversation is.
        settings: limits, from the configuration.
        seed: of the episode; `None` = unseeded.
        session: names the episode to the engine, so that its turns share a prefix cache.
    """
    built = TrajectoryBuilder()
    try:
        end = await turns(task, env, engine, renderer, settings, seed, session, built)
    except EnvLost as error:
        end = Ending(Outcome.ENV_FAILED, str(error))
    except EngineLost as error:
        end = Ending(Outcome.ABORTED, str(error))
    end, reward = await score(end, env, built.messages, settings.verify_timeout_s)
    return built.build(task, end.outcome, reward, end.reason, end.final_answer)


async def turns(
    task: Task,
    env: Environment,
    engine: Engine,
    renderer: Renderer,
    settings: EpisodeSettings,
    seed: int | None,
    session: str,
    built: TrajectoryBuilder,
) -> Ending:
    """Play turns into `built` until something ends the episode."""
    first = await reset(env, task)
    built.say("system", SYSTEM)
    built.say("user", first.content)
    built.begin(renderer.initial(SYSTEM, first.tools, first.content))
    for turn in range(settings.max_turns):
        room = settings.max_context - len(built.ids)
        if room <= 0:
            return Ending(Outcome.CONTEXT_OVERFLOW if turn else Outcome.PROMPT_TOO_LONG)
        tokens = min(settings.max_tokens_per_turn, room)
        own_seed = None if seed is None else stable_seed(seed, turn)
        params = SamplingParams(settings.temperature, tokens, renderer.stop_token_ids, own_seed)
        sampled = await engine.generate(built.ids, params, session)
        built.add_action(sampled)
        said = renderer.text(sampled.token_ids.tolist())
        built.say("assistant", said)
        if sampled.finish_reason == "abort":
            return Ending(Outcome.ABORTED, "the engine aborted the turn")
        if sampled.finish_reason != "stop":
            return Ending(Outcome.GENERATION_TRUNCATED)
        parsed = renderer.parse(said, first.tools)
        if parsed.final_answer is not None or not parsed.tool_calls:
            return Ending(Outcome.COMPLETED, final_answer=parsed.final_answer)
        shown = await env.step(parsed.tool_calls[0])
        text = shown.content if shown.error is None else f"Error: {shown.error.message}"
        text = text[: settings.agent.max_tool_output_chars]
        built.say("tool", text)
        if shown.done:
            return Ending(Outcome.COMPLETED)
        result = ToolResult(parsed.tool_calls[0].name, text, turn, parsed.call_ids[0])
        built.add_observation(renderer.observation([result], built.ids[-1]))
    return Ending(Outcome.MAX_TURNS)

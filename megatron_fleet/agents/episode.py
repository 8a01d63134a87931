"""One episode: an async procedure that plays a Task and leaves a Trajectory."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from megatron_fleet.agents import prompts
from megatron_fleet.agents.builder import TrajectoryBuilder
from megatron_fleet.agents.engine import Engine, EngineLost, Generation, SamplingParams
from megatron_fleet.agents.parser import ParsedTurn, parse_turn
from megatron_fleet.agents.renderer import Qwen3Renderer, to_json
from megatron_fleet.agents.trajectory import Outcome, Trajectory
from megatron_fleet.config.schema import Env, Rollout
from megatron_fleet.data.task import Task
from megatron_fleet.envs.base import EnvBusy, Environment, EnvLost, Observation, ToolCall

MIN_TURN_TOKENS = 16
"""A turn starts only if this many tokens (or a whole turn, when that is shorter) still fit into the context."""
BUSY_PAUSE_S, MAX_BUSY_PAUSE_S = 0.2, 5.0
"""First and longest pause before a busy environment is asked again; doubled each time, with jitter."""
VERIFY_GRACE_S = 2.0
"""Above the environment's own deadline for verify, which should fire first because it knows the reason."""
CLOSE_TIMEOUT_S = 10.0
_UNVERIFIED = (Outcome.PROMPT_TOO_LONG, Outcome.ENV_FAILED, Outcome.ABORTED)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EpisodeSettings:
    """Limits of an episode; the fields of the same names in the configuration define them.

    Attributes:
        routing: keep the experts of each token.
    """

    max_context: int
    max_tokens_per_turn: int
    max_turns: int
    max_no_action_turns: int
    max_tool_output_chars: int
    temperature: float
    episode_timeout_s: float
    verify_timeout_s: float
    routing: bool = False

    @classmethod
    def from_config(cls, rollout: Rollout, env: Env) -> EpisodeSettings:
        return cls(
            max_context=rollout.max_context,
            max_tokens_per_turn=rollout.sampling.max_tokens_per_turn,
            max_turns=rollout.sampling.max_turns,
            max_no_action_turns=rollout.max_no_action_turns,
            max_tool_output_chars=env.max_tool_output_chars,
            temperature=rollout.sampling.temperature,
            episode_timeout_s=rollout.episode_timeout_s,
            verify_timeout_s=env.verify_timeout_s,
            routing=rollout.engine.routing_replay,
        )


@dataclass(frozen=True, slots=True)
class _Ending:
    outcome: Outcome
    reason: str = ""
    final_answer: str | None = None


def stable_seed(*parts: int | str) -> int:
    """A seed in ``[0, 2**63)`` from ``parts``; the same in every process and Python version."""
    digest = hashlib.blake2b("\x1f".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


async def run_episode(
    task: Task,
    group: int,
    sample: int,
    env: Environment,
    engine: Engine,
    renderer: Qwen3Renderer,
    settings: EpisodeSettings,
    seed: int | None,
    session: str,
) -> Trajectory:
    """Play ``task`` once: reset, then turns until something ends the episode, verify, close.

    Whatever the policy, the environment and the engine do within their protocols ends in a Trajectory. Playing and
    verifying have deadlines of their own, so that an episode that ran out of time can still be scored. The
    environment is closed in every case, cancellation included.

    Args:
        seed: of this episode; each turn derives its own. ``None`` leaves sampling unseeded.
        session: names the episode to the engine (see ``Engine.generate``).

    Raises:
        CancelledError: after the environment was closed.
    """
    began = time.perf_counter()
    builder = TrajectoryBuilder()
    try:
        ending = await _Play(task, env, engine, renderer, settings, seed, session, builder).until_deadline()
        with _timed(builder, "verify_s"):
            ending, reward = await _score(ending, env, builder, settings)
    finally:
        await _close(env)
    builder.metrics["seconds"] = time.perf_counter() - began
    return builder.build(task, group, sample, ending.outcome, reward, ending.reason, ending.final_answer)


@dataclass(slots=True)
class _Play:
    """The turns of one episode."""

    task: Task
    env: Environment
    engine: Engine
    renderer: Qwen3Renderer
    settings: EpisodeSettings
    seed: int | None
    session: str
    builder: TrajectoryBuilder
    calls_made: set[str] = field(default_factory=set)

    async def until_deadline(self) -> _Ending:
        limit = self.settings.episode_timeout_s
        try:
            async with asyncio.timeout(limit) as deadline:
                return await self._episode()
        except TimeoutError:
            if not deadline.expired():
                raise
            if not self.builder.messages:
                return _Ending(Outcome.ENV_FAILED, f"the environment did not start within {limit:g} s")
            return _Ending(Outcome.TIMEOUT, f"the episode did not end within {limit:g} s")
        except EnvLost as e:
            return _Ending(Outcome.ENV_FAILED, f"environment lost: {e}")
        except EngineLost as e:
            return _Ending(Outcome.ABORTED, f"engine lost: {e}")

    async def _episode(self) -> _Ending:
        with _timed(self.builder, "env_s"):
            first = await self._reset()
        if not self._begin(first):
            return _Ending(Outcome.PROMPT_TOO_LONG, f"the first prompt leaves no room in {self.settings.max_context}")
        turns_without_call = 0
        for turn in range(self.settings.max_turns):
            max_tokens = min(self.settings.max_tokens_per_turn, self.settings.max_context - len(self.builder.ids))
            generation = await self._generate(turn, max_tokens)
            if generation.finish_reason == "abort":
                return _Ending(Outcome.ABORTED, "the engine aborted the turn")
            if generation.finish_reason == "length":
                shrunk = max_tokens < self.settings.max_tokens_per_turn
                return _Ending(Outcome.CONTEXT_OVERFLOW if shrunk else Outcome.GENERATION_TRUNCATED)
            parsed = parse_turn(self.builder.messages[-1]["content"])
            if parsed.final_answer is not None:
                return _Ending(Outcome.COMPLETED, final_answer=parsed.final_answer)
            texts, env_done = await self._act(parsed)
            if env_done:
                return _Ending(Outcome.COMPLETED)
            turns_without_call = 0 if parsed.tool_calls else turns_without_call + 1
            if turns_without_call == self.settings.max_no_action_turns:
                return _Ending(Outcome.NO_ACTION)
            if turn + 1 < self.settings.max_turns and not self._show(texts):
                return _Ending(Outcome.CONTEXT_OVERFLOW)
        return _Ending(Outcome.MAX_TURNS)

    async def _reset(self) -> Observation:
        pause = BUSY_PAUSE_S
        while True:
            try:
                return await self.env.reset(self.task)
            except EnvBusy:
                await asyncio.sleep(pause * random.uniform(0.5, 1.0))
                pause = min(2 * pause, MAX_BUSY_PAUSE_S)

    def _begin(self, first: Observation) -> bool:
        """Lay down the first prompt; false, and no tokens, when it does not fit."""
        system = prompts.system_prompt(self.task.env_key)
        user = prompts.user_prompt(self.task, first.content)
        self.builder.say("system", system)
        self.builder.say("user", user)
        ids = self.renderer.initial(system, first.tools, user)
        if not self._fits(ids):
            return False
        self.builder.add_prompt(ids)
        return True

    async def _generate(self, turn: int, max_tokens: int) -> Generation:
        seed = None if self.seed is None else stable_seed(self.seed, turn)
        routing_start = self.builder.routed if self.settings.routing else None
        stop = self.renderer.stop_token_ids
        params = SamplingParams(self.settings.temperature, max_tokens, stop, seed, routing_start)
        with _timed(self.builder, "generate_s"):
            generation = await self.engine.generate(self.builder.ids, params, self.session)
        self.builder.add_action(generation)
        self.builder.say("assistant", self.renderer.text(generation.token_ids.tolist()))
        return generation

    async def _act(self, parsed: ParsedTurn) -> tuple[list[str], bool]:
        """Run the turn's tool calls in order. Returns what to show (nothing: remind) and whether the env is done."""
        texts = []
        for call in parsed.tool_calls:
            with _timed(self.builder, "env_s"):
                observation = await self.env.step(call)
            texts.append(self._result(call, observation))
            if observation.done:
                return texts, True
        if parsed.errors:
            self.builder.count("parse_errors")
        elif not parsed.tool_calls:
            self.builder.count("no_action_turns")
        return [*texts, *parsed.errors], False

    def _result(self, call: ToolCall, observation: Observation) -> str:
        self.builder.count("tool_calls")
        written = call.name + to_json(call.arguments)
        if written in self.calls_made:
            self.builder.count("repeated_calls")
        self.calls_made.add(written)
        if observation.error is not None:
            self.builder.count("tool_errors")
            text = f"Error ({observation.error.kind}): {observation.error.message}"
        else:
            text = observation.content
        limit = self.settings.max_tool_output_chars
        if len(text) > limit:
            text = f"{text[:limit]}\n[cut: {limit} of {len(text)} characters shown]"
        self.builder.say("tool", text)
        return text

    def _show(self, texts: list[str]) -> bool:
        """Append the results, or a reminder when there are none; false, and no tokens, when they do not fit."""
        role: Literal["tool", "user"] = "tool" if texts else "user"
        ids = self.renderer.observation(texts or [prompts.REMINDER], role, self.builder.ids[-1])
        if not self._fits(ids):
            return False
        self.builder.add_observation(ids)
        return True

    def _fits(self, ids: list[int]) -> bool:
        room = self.settings.max_context - len(self.builder.ids) - len(ids)
        return room >= min(MIN_TURN_TOKENS, self.settings.max_tokens_per_turn)


async def _score(
    ending: _Ending, env: Environment, builder: TrajectoryBuilder, settings: EpisodeSettings
) -> tuple[_Ending, float | None]:
    """Ask the verifier where there is something to verify; an unknown reward names its reason."""
    if ending.outcome in _UNVERIFIED:
        return ending, None
    limit = settings.verify_timeout_s + VERIFY_GRACE_S
    try:
        async with asyncio.timeout(limit):
            reward = await env.verify(ending.final_answer, builder.messages)
        value, reason = reward.value, reward.reason
    except TimeoutError:
        value, reason = None, f"the verifier gave no answer within {limit:g} s"
    except EnvLost as e:
        value, reason = None, f"environment lost before it could verify: {e}"
    if value is not None and not math.isfinite(value):
        value, reason = None, f"the verifier returned {value}"
    timed_out = ending.outcome is Outcome.TIMEOUT
    outcome = Outcome.VERIFIER_FAILED if value is None and not timed_out else ending.outcome
    return _Ending(outcome, reason, ending.final_answer), value


async def _close(env: Environment) -> None:
    """Close within the deadline, even if cancelled (again) meanwhile; the cancellation is raised afterwards."""
    closing = asyncio.create_task(env.close())
    loop = asyncio.get_running_loop()
    end = loop.time() + CLOSE_TIMEOUT_S
    cancelled: asyncio.CancelledError | None = None
    while not closing.done() and loop.time() < end:
        try:
            await asyncio.wait({closing}, timeout=end - loop.time())
        except asyncio.CancelledError as e:
            cancelled = e
    if not closing.done():
        closing.cancel()
        log.warning("an environment did not close within %g s", CLOSE_TIMEOUT_S)
    elif not closing.cancelled() and (error := closing.exception()):
        log.warning("an environment failed to close: %r", error)
    if cancelled is not None:
        raise cancelled


@contextmanager
def _timed(builder: TrajectoryBuilder, name: str) -> Iterator[None]:
    began = time.perf_counter()
    try:
        yield
    finally:
        builder.count(name, time.perf_counter() - began)

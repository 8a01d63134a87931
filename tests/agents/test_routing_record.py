"""A trajectory keeps, for every token that was fed, the experts that the engine told; over turns, gaps and caches."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from agent_doubles import CALL, TASK, ScriptedEngine, ScriptedEnvironment, Turn
from test_episode import SETTINGS

from megatron_fleet.agents.settings import EpisodeSettings
from megatron_fleet.agents.token_conversation import run_episode
from megatron_fleet.agents.trajectory import Group
from megatron_fleet.algorithms.batch import build_data
from megatron_fleet.config.schema import (
    AgentConfig,
    AlgorithmConfig,
    EngineConfig,
    EnvConfig,
    RolloutConfig,
    SamplingConfig,
)
from megatron_fleet.envs.base import Observation

LAYERS, CHOICES = 3, 2
SCRIPT = [Turn(f"<think>look</think>{CALL}"), Turn(CALL), Turn("3 <done>")]


def experts(place: int) -> np.ndarray:
    """Choices for the token at a place of the sequence, as one engine always tells them."""
    first = np.arange(LAYERS) * 7 + place
    return np.stack([first % 16, (first + 1 + place % 5) % 16], axis=1).astype(np.uint8)


class MoeEngine(ScriptedEngine):
    """Tells experts as vLLM does: from ``routing_start`` on, without the last sampled token.

    Attributes:
        told: per request, what becomes of the rows.
    """

    def __init__(self, *args, told):
        super().__init__(*args)
        self.told = list(told)

    async def generate(self, prompt_ids, params, session, images=()):
        generation = await super().generate(prompt_ids, params, session)
        if params.routing_start is None:
            return generation
        fed = len(prompt_ids) + len(generation.token_ids) - 1
        rows = np.stack([experts(place) for place in range(params.routing_start, fed)])
        return dataclasses.replace(generation, routing=self.told.pop(0)(rows))


def everything(rows):
    return rows


def nothing(rows):
    return None


def half(rows):
    return rows[: len(rows) // 2]


@pytest.fixture
def play(tokenizer, renderer):
    async def run(*told, **changes):
        env = ScriptedEnvironment(step_script=[Observation("[1, 2]"), Observation("[3]")])
        engine = MoeEngine(tokenizer, list(SCRIPT), told=told)
        settings = dataclasses.replace(SETTINGS, **{"routing": True} | changes)
        trajectory = await run_episode(TASK, env, engine, renderer, settings, 5, session="s")
        trajectory.check()
        return trajectory, engine

    return run


@pytest.mark.parametrize(
    "told",
    [
        (everything, everything, everything),
        (everything, nothing, everything),
        (nothing, nothing, everything),
        (half, half, everything),
    ],
)
async def test_every_token_that_was_fed_has_its_experts(play, told):
    """Choices that one request does not report are asked of the next one: its prompt holds those tokens."""
    t, _ = await play(*told)
    assert t.routing.dtype == np.uint8 and t.routing.shape == (len(t.token_ids), LAYERS, CHOICES)
    for place in range(len(t.token_ids) - 1):
        np.testing.assert_array_equal(t.routing[place], experts(place))
    assert not t.routing[-1].any()


async def test_nothing_is_told_twice(play):
    _, engine = await play(everything, everything, everything)
    lengths = [len(p) + len(g.token_ids) for p, g in zip(engine.prompts, engine.generations, strict=True)]
    assert [p.routing_start for p in engine.params] == [0, lengths[0] - 1, lengths[1] - 1]


async def test_what_the_last_request_does_not_tell_stays_unknown(play):
    t, _ = await play(everything, everything, half)
    known = t.routing.any(axis=(1, 2))
    edge = int(known.sum())
    assert known[:edge].all() and 0 < edge < len(t.token_ids) - 1
    assert (t.routing[edge:, :, 0] == t.routing[edge:, :, 1]).all()  # equal ids: no choice
    assert (await play(nothing, nothing, nothing))[0].routing is None


async def test_nothing_is_asked_for_unless_it_is_replayed(play):
    t, engine = await play(routing=False)
    assert t.routing is None and [p.routing_start for p in engine.params] == [None] * 3
    rollout = RolloutConfig(
        prompts_per_step=1,
        samples_per_prompt=2,
        max_context=99,
        sampling=SamplingConfig(max_tokens_per_turn=9, max_turns=1),
    )
    assert not EpisodeSettings.from_config(rollout, EnvConfig(), AgentConfig()).routing
    replayed = rollout.model_copy(update={"engine": EngineConfig(routing_replay=True)})
    assert EpisodeSettings.from_config(replayed, EnvConfig(), AgentConfig()).routing


async def test_experts_of_tokens_that_were_not_fed_are_refused(play):
    with pytest.raises(ValueError, match=r"experts of .* tokens, but only"):
        await play(lambda rows: np.concatenate([rows, rows[:1]]), everything, everything)


async def test_a_trajectory_with_experts_of_other_tokens_is_refused(play):
    t, _ = await play(everything, everything, everything)
    t.routing = t.routing[1:]
    with pytest.raises(ValueError, match="experts of"):
        t.check()


async def test_experts_go_into_the_training_sequence(play):
    t, _ = await play(everything, everything, everything)
    other = dataclasses.replace(t, sample=3, reward=0.0, routing=None)
    batch = build_data([Group(0, TASK.key, TASK.env_key, [t, other])], AlgorithmConfig())
    experts = batch.data[0].extras["routing"]
    np.testing.assert_array_equal(experts, t.routing)
    assert np.shares_memory(experts, t.routing) and batch.data[1].extras == {}

"""Registry of agents, which play an episode from the first prompt to the verdict."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Protocol

from megatron_fleet.agents.settings import EpisodeSettings
from megatron_fleet.agents.token_conversation import run_episode
from megatron_fleet.agents.token_engine import Engine
from megatron_fleet.agents.trajectory import Trajectory
from megatron_fleet.config.extension import Interface, load
from megatron_fleet.config.names import is_path
from megatron_fleet.data.task import Task
from megatron_fleet.envs.base import Environment
from megatron_fleet.models.chat.renderer import Renderer


class Agent(Protocol):
    async def __call__(
        self,
        task: Task,
        env: Environment,
        engine: Engine,
        renderer: Renderer,
        settings: EpisodeSettings,
        seed: int | None,
        session: str,
        /,
    ) -> Trajectory:
        """Play ``task`` once; see `agents.token_conversation.run_episode` for the arguments.

        The trajectory holds every token that the engine was given or sampled (`TrajectoryBuilder` collects them), an
        outcome, and the verifier's reward or ``None``. The caller closes the environment. Any exception ends the
        episode as ``aborted``, with an unknown reward.
        """
        ...


OWN_AGENT = Interface("agent.kind", "agent: the whole episode", Agent, "episode workers")
AGENTS: Mapping[str, Agent] = MappingProxyType({"tools": run_episode})
"""Agents by value of ``agent.kind``."""


def make_agent(name: str) -> Agent:
    """Return the agent of this name, or load the user's own from this path. Raises UserError."""
    return _own(name) if is_path(name) else AGENTS[name]


def _own(path: str) -> Agent:
    agent: Agent = load(OWN_AGENT, path)
    settings_at = list(OWN_AGENT.arguments).index("settings")

    async def play(*arguments: Any) -> Trajectory:
        settings: EpisodeSettings = arguments[settings_at]
        limit = settings.episode_timeout_s + settings.verify_timeout_s
        try:
            async with asyncio.timeout(limit) as deadline:
                played = await agent(*arguments)
        except TimeoutError as error:
            if not deadline.expired():
                raise
            raise TimeoutError(f"agent.kind={path} played for more than {limit:g} s") from error
        if not isinstance(played, Trajectory):
            raise TypeError(f"agent.kind={path} returned {type(played).__name__}; it must return a Trajectory")
        return played

    return play

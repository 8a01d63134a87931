"""The embedded fleet as an OpenEnv environment: list_tools, call_tool, and one reserved tool that ends the episode."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from megatron_fleet.data.task import Task
from megatron_fleet.envs.base import ToolCall, ToolError
from megatron_fleet.envs.embedded.session import EmbeddedSession
from megatron_fleet.envs.embedded.verifier_client import VerifierClient
from megatron_fleet.envs.openenv_client import import_openenv

import_openenv()

from openenv.core.env_server import (  # noqa: E402
    CallToolAction,
    CallToolObservation,
    Environment,
    ListToolsAction,
    ListToolsObservation,
    Observation,
    State,
    Tool,
)
from openenv.core.env_server import ToolError as WireError  # noqa: E402

FINISH_TOOL = "submit_final_answer"


@dataclass(frozen=True, slots=True)
class Faults:
    """Misbehaviour for tests: tool name → what calling it does instead."""

    delay_s: tuple[tuple[str, float], ...] = ()
    """Sleeps first; a long sleep is a hanging tool."""
    dies: tuple[str, ...] = ()
    """Raises outside of the tool protocol, as a broken environment does."""


class FleetEnvironment(Environment):
    """One session. ``reset`` takes the fields of a Task; every tool call runs on the server's loop (microseconds)."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self, verifier: VerifierClient, faults: Faults | None = None) -> None:
        super().__init__()
        self._verifier = verifier
        self._delays = dict(faults.delay_s) if faults else {}
        self._dies = frozenset(faults.dies) if faults else frozenset()
        self._session: EmbeddedSession | None = None
        self._done = False
        self._state = State()

    async def reset_async(
        self,
        seed: int | None = None,
        episode_id: str | None = None,
        *,
        task_key: str = "",
        prompt: str = "",
        env_key: str = "",
        data_key: str | None = None,
        env_variables: dict[str, Any] | None = None,
        verifier_code: str = "",
        **_: Any,
    ) -> Observation:
        """Start a task. Raises KeyError for an environment that this fleet does not have."""
        self.close()
        task = Task(task_key, prompt, env_key, verifier_code, data_key=data_key, env_variables=env_variables or {})
        self._session = EmbeddedSession(task)
        self._done = False
        self._state = State(episode_id=episode_id, step_count=0)
        return Observation(metadata={"prompt": prompt})

    async def step_async(self, action: Any, timeout_s: float | None = None, **_: Any) -> Observation:
        """List the tools or call one. Raises RuntimeError before ``reset``."""
        if self._session is None:
            raise RuntimeError("the session was not reset")
        if isinstance(action, ListToolsAction):
            return _tool_list(self._session)
        self._state.step_count += 1
        name = action.tool_name
        if name in self._delays:
            await asyncio.sleep(self._delays[name])
        if name in self._dies:
            raise RuntimeError(f"{name} broke the session")
        if self._done:
            return _failure(name, ToolError("execution_error", "the episode is over"))
        if name == FINISH_TOOL:
            return await self._finish(self._session, action.arguments)
        shown = self._session.call(ToolCall(name, action.arguments))
        if shown.error is not None:
            return _failure(name, shown.error)
        return CallToolObservation(tool_name=name, result=shown.content)

    async def _finish(self, session: EmbeddedSession, arguments: dict[str, Any]) -> Observation:
        self._done = True
        reward = await self._verifier.verify(
            session.task.verifier_code,
            session.world.seed,
            session.world.current(),
            arguments.get("answer"),
            arguments.get("conversation"),
        )
        result = {"reason": reward.reason}
        return CallToolObservation(tool_name=FINISH_TOOL, result=result, done=True, reward=reward.value)

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Observation:
        return asyncio.run(self.reset_async(seed, episode_id, **kwargs))

    def step(self, action: Any, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        return asyncio.run(self.step_async(action, timeout_s, **kwargs))

    @property
    def state(self) -> State:
        return self._state

    def close(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None


def _tool_list(session: EmbeddedSession) -> ListToolsObservation:
    specs = session.world.tools()
    return ListToolsObservation(
        tools=[Tool(name=s["name"], description=s["description"], input_schema=s["parameters"]) for s in specs]
    )


def _failure(name: str, error: ToolError) -> CallToolObservation:
    return CallToolObservation(tool_name=name, error=WireError(error_type=error.kind, message=error.message))


ACTION, OBSERVATION = CallToolAction, CallToolObservation

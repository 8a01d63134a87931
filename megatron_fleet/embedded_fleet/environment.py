"""Embedded fleet as an OpenEnv environment: list_tools, call_tool, and one reserved tool that ends the episode."""

from __future__ import annotations

import asyncio
from typing import Any

from megatron_fleet.data.task import Task
from megatron_fleet.embedded_fleet.connections import connection
from megatron_fleet.embedded_fleet.faults import Fault, FaultSource, ToolFaults
from megatron_fleet.embedded_fleet.tasks import EmbeddedSession
from megatron_fleet.embedded_fleet.verifier_client import VerifierClient
from megatron_fleet.envs.base import ToolCall, ToolError
from megatron_fleet.envs.openenv_client import import_openenv
from megatron_fleet.envs.openenv_tools import FINISH_TOOL

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

NO_FAULTS = ToolFaults()


class EmbeddedEnvironment(Environment):
    """One session. ``reset`` takes the fields of a Task; tool calls run on the server's event loop (microseconds).

    Connection faults require the session to be served through ``Connections``.
    """

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self, verifier: VerifierClient, faults: FaultSource = NO_FAULTS) -> None:
        super().__init__()
        self._verifier = verifier
        self._faults = faults
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
        """Start a task. Raises KeyError for an environment that is not in this fleet."""
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
        call, name = self._state.step_count, action.tool_name
        self._state.step_count += 1
        fault = self._faults.of(self._state.episode_id or "", call, name, last=name == FINISH_TOOL)
        await _suffer(fault, name)
        shown = await self._answer(self._session, name, action.arguments, fault)
        if fault.damage is not None:
            connection().damage_next(fault.damage)
        return shown

    async def _answer(
        self, session: EmbeddedSession, name: str, arguments: dict[str, Any], fault: Fault
    ) -> Observation:
        if self._done:
            return _failure(name, ToolError("execution_error", "the episode is over"))
        if name == FINISH_TOOL:
            self._done = True
            if fault.no_verdict:
                result = {"reason": "the verifier could not run"}
                return CallToolObservation(tool_name=name, result=result, done=True, reward=None)
            return await self._finish(session, arguments)
        shown = session.call(ToolCall(name, arguments))
        if shown.error is not None:
            return _failure(name, shown.error)
        return CallToolObservation(tool_name=name, result=shown.content)

    async def _finish(self, session: EmbeddedSession, arguments: dict[str, Any]) -> Observation:
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


async def _suffer(fault: Fault, tool: str) -> None:
    """Apply ``fault`` before the call is answered. A hanging or dead session stays here until it is ended."""
    if fault.slow_s:
        await asyncio.sleep(fault.slow_s)
    if fault.dies:
        await connection().die()
    if fault.dies or fault.hangs:
        await asyncio.Event().wait()
    if fault.breaks:
        raise RuntimeError(f"{tool} broke the session")


def _tool_list(session: EmbeddedSession) -> ListToolsObservation:
    specs = session.world.tools()
    return ListToolsObservation(
        tools=[Tool(name=s["name"], description=s["description"], input_schema=s["parameters"]) for s in specs]
    )


def _failure(name: str, error: ToolError) -> CallToolObservation:
    return CallToolObservation(tool_name=name, error=WireError(error_type=error.kind, message=error.message))


ACTION, OBSERVATION = CallToolAction, CallToolObservation

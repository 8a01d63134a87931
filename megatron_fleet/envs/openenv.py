"""OpenEnvEnvironment: one episode in an environment behind an OpenEnv server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import uuid
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from megatron_fleet.config.schema import Env
from megatron_fleet.data.task import Task
from megatron_fleet.envs.base import EnvBusy, Environment, EnvLost, Observation, Reward, ToolCall, ToolError
from megatron_fleet.envs.embedded.fleet import EmbeddedFleet
from megatron_fleet.envs.openenv_client import one_socket_client

__all__ = ["EmbeddedFleet", "OpenEnvEnvironment", "make_environment"]

T = TypeVar("T")

FINISH_TOOL = "submit_final_answer"
"""The tool that ends the episode; its observation carries the reward (``None`` when the verifier could not run)."""
CLOSE_S = 2.0
TOOL_ERROR_KINDS = frozenset({"tool_not_found", "invalid_args", "execution_error", "timeout", "transport_error"})


class OpenEnvEnvironment:
    """The Environment protocol over one WebSocket session.

    A timeout, a transport error or a cancellation poisons the session, because what the server did meanwhile is
    unknown: every later call raises EnvLost.
    """

    def __init__(self, config: Env, url: str) -> None:
        self._config = config
        self._url = url
        self._client = self._new_client()
        self._lost: str | None = None
        self._task: Task | None = None
        self._reward: Reward | None = None

    async def reset(self, task: Task) -> Observation:
        """See ``Environment.reset``."""
        self._task = task
        fields = {
            "episode_id": uuid.uuid4().hex,
            "task_key": task.key,
            "prompt": task.prompt,
            "env_key": task.env_key,
            "env_version": task.env_version,
            "data_key": task.data_key,
            "data_version": task.data_version,
            "env_variables": task.env_variables,
            "verifier_code": task.verifier_code,
            "task_modality": task.modality,
        }

        async def start() -> Any:
            await self._client.reset(**fields)
            return await self._client.step({"type": "list_tools"})

        try:
            listed = await self._within(self._config.reset_timeout_s, "reset", start)
        except EnvBusy:
            # The server refused this socket and nothing happened behind it: the next attempt gets another one.
            await self.close()
            self._client, self._lost = self._new_client(), None
            raise
        tools = tuple(_openai_tool(t) for t in listed.observation.get("tools") or () if t["name"] != FINISH_TOOL)
        if not tools:
            self._lost = "the environment lists no tools"
            raise EnvLost(self._lost)
        return Observation(content=task.prompt, tools=tools)

    async def step(self, call: ToolCall) -> Observation:
        """See ``Environment.step``."""
        if not isinstance(call.arguments, dict):
            # A server would refuse this as a protocol error, or retry it for half a minute.
            return Observation("", error=ToolError("invalid_args", "arguments must be a JSON object"))
        if call.name == FINISH_TOOL:
            return Observation("", error=ToolError("tool_not_found", f"no tool {FINISH_TOOL}"))
        result = await self._call(call.name, call.arguments, self._config.step_timeout_s)
        if result.done:
            self._reward = _reward(result)
        error = _tool_error(result.observation)
        content = "" if error else _text(result.observation.get("result"))
        return Observation(content, error=error, done=bool(result.done))

    async def verify(self, final_answer: str | None, conversation: list[dict[str, Any]]) -> Reward:
        """See ``Environment.verify``."""
        if self._reward is not None:
            return self._reward
        arguments: dict[str, Any] = {"answer": final_answer}
        if self._task is not None and "conversation" in self._task.verifier_code:
            arguments["conversation"] = conversation
        try:
            result = await self._call(FINISH_TOOL, arguments, self._config.verify_timeout_s)
        except EnvLost as lost:
            return Reward(None, f"session lost before the verdict: {lost}")
        self._reward = _reward(result)
        return self._reward

    async def close(self) -> None:
        """See ``Environment.close``."""
        self._lost = self._lost or "closed"
        with contextlib.suppress(Exception):
            async with asyncio.timeout(CLOSE_S):
                await self._client.close()

    def _new_client(self) -> Any:
        config = self._config
        longest = max(config.reset_timeout_s, config.step_timeout_s, config.verify_timeout_s)
        # The deadlines below are the ones that count; the client's own must never come first.
        return one_socket_client()(
            base_url=self._url, connect_timeout_s=config.reset_timeout_s + 1, message_timeout_s=longest + 1
        )

    async def _call(self, name: str, arguments: dict[str, Any], timeout_s: float) -> Any:
        action = {"type": "call_tool", "tool_name": name, "arguments": arguments}
        return await self._within(timeout_s, name, lambda: self._client.step(action))

    async def _within(self, timeout_s: float, what: str, request: Callable[[], Awaitable[T]]) -> T:
        """Await one request with its deadline, and poison the session unless it succeeds."""
        if self._lost is not None:
            raise EnvLost(self._lost)
        self._lost = f"{what} was interrupted"
        try:
            async with asyncio.timeout(timeout_s):
                answer = await request()
        except TimeoutError as error:
            self._lost = f"{what} took more than {timeout_s:g} s"
            raise EnvLost(self._lost) from error
        except Exception as error:
            self._lost = f"{what}: {type(error).__name__}: {error}"
            if "CAPACITY_REACHED" in str(error):
                raise EnvBusy(self._lost) from error
            raise EnvLost(self._lost) from error
        self._lost = None
        return answer


def make_environment(config: Env, url: str) -> Environment:
    """One Environment, for one episode, at the OpenEnv server ``url``."""
    return OpenEnvEnvironment(config, url)


def _openai_tool(tool: dict[str, Any]) -> dict[str, Any]:
    parameters = tool.get("input_schema") or {"type": "object", "properties": {}}
    function = {"name": tool["name"], "description": tool.get("description") or "", "parameters": parameters}
    return {"type": "function", "function": function}


def _tool_error(observation: dict[str, Any]) -> ToolError | None:
    error = observation.get("error")
    if error is None:
        return None
    if not isinstance(error, dict):
        return ToolError("execution_error", str(error))
    kind = error.get("error_type")
    return ToolError(kind if kind in TOOL_ERROR_KINDS else "execution_error", str(error.get("message", "")))


def _text(result: Any) -> str:
    """A tool's result as text: MCP results are unwrapped, structured ones are JSON."""
    if isinstance(result, dict):
        if result.get("data") is not None:
            result = result["data"]
        elif isinstance(result.get("content"), list):
            result = "\n".join(_text(part.get("text", part)) for part in result["content"])
    return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)


def _reward(result: Any) -> Reward:
    error = _tool_error(result.observation)
    if error is not None:
        return Reward(None, f"the environment could not finish: {error.message}")
    given = result.observation.get("result")
    reason = str(given.get("reason", "")) if isinstance(given, dict) else ""
    value = result.reward
    if value is None:
        return Reward(None, reason or "the environment gave no reward")
    return Reward(float(value), reason)

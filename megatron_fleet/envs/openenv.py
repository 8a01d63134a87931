"""OpenEnvEnvironment: one episode in an environment behind an OpenEnv server, whichever it is."""

from __future__ import annotations

import asyncio
import contextlib
import json
import uuid
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from megatron_fleet.config.sections.env import Env
from megatron_fleet.config.sections.openenv import OpenEnv
from megatron_fleet.data.task import Task
from megatron_fleet.envs.base import EnvBusy, EnvLost, Observation, Reward, ToolCall, ToolError
from megatron_fleet.envs.busy import is_busy
from megatron_fleet.envs.content import error_text, read_content
from megatron_fleet.envs.openenv_client import action_schema, one_socket_client
from megatron_fleet.envs.openenv_tools import (
    FINISH_TOOL,
    action_tool,
    explain,
    finish_arguments,
    mcp_tools,
    reset_arguments,
)
from megatron_fleet.envs.verdict import verdict

T = TypeVar("T")

TOOL_ERROR_KINDS = frozenset({"tool_not_found", "invalid_args", "execution_error", "timeout", "transport_error"})


class Refused(Exception):
    """The server did not take the request's form; nothing happened and the session goes on."""


class OpenEnvEnvironment:
    """The Environment protocol over one WebSocket session.

    The server either lists tools and calls them (the Model Context Protocol's way) or takes one action, whose schema
    then is the one tool. A timeout, a transport error or a cancellation poisons the session, because what the server
    did meanwhile is unknown: every later call raises EnvLost.
    """

    def __init__(self, config: Env, url: str, openenv: OpenEnv, episode: str | None = None, token: str = "") -> None:
        """
        Args:
            config: gives the deadlines.
            openenv: how to play this server.
            episode: what the server is to call the episode; a random name by default.
            token: that the server asks for; empty: none.
        """
        self._headers = {"Authorization": f"Bearer {token}"} if token else None
        self._config = config
        self._openenv = openenv
        self._episode = episode or uuid.uuid4().hex
        self._url = url
        self._client = self._new_client()
        self._lost: str | None = None
        self._task: Task | None = None
        self._tools: dict[str, dict[str, Any]] = {}
        self._action: str | None = None
        self._rewards: list[Any] = []
        self._last: Any = None
        self._reward: Reward | None = None

    async def reset(self, task: Task) -> Observation:
        """See ``Environment.reset``."""
        self._task = task
        arguments = reset_arguments(task, self._episode, self._openenv.reset_kwargs)

        async def start() -> Any:
            shown = _checked(await self._client.reset(**arguments))
            self._tools = await self._list_tools()
            return shown

        try:
            await self._within(self._config.make_timeout_s, "connect", self._client.connect, starting=True)
            shown = await self._within(self._config.reset_timeout_s, "reset", start, starting=True)
        except EnvBusy:
            # The server refused this socket and nothing happened behind it: the next attempt gets another one.
            await self.close()
            self._client, self._lost = self._new_client(), None
            raise
        hidden = (self._openenv.finish_tool, self._openenv.verify_tool)
        for key, name in zip(("finish_tool", "verify_tool"), hidden, strict=True):
            if name not in (None, FINISH_TOOL, *self._tools):
                self._lost = f"env.openenv.{key}={name}: no such tool; the environment has {', '.join(self._tools)}"
                raise EnvLost(self._lost)
        offered = tuple(tool for name, tool in self._tools.items() if name not in hidden)
        # A server that asks one question has one tool, which takes the final answer: the policy then has none.
        if not offered and self._openenv.finish_tool not in self._tools:
            self._lost = "the environment lists no tools"
            raise EnvLost(self._lost)
        return Observation(content=_opening(task.prompt, shown.observation), tools=offered)

    async def step(self, call: ToolCall) -> Observation:
        """See ``Environment.step``."""
        if not isinstance(call.arguments, dict):
            # A server would refuse this as a protocol error, or retry it for half a minute.
            return Observation("", error=ToolError("invalid_args", "arguments must be a JSON object"))
        hidden = call.name in (self._openenv.finish_tool, self._openenv.verify_tool)
        if hidden or (self._action is not None and call.name != self._action):
            return Observation("", error=ToolError("tool_not_found", f"no tool {call.name}"))
        try:
            result = await self._call(call.name, call.arguments, self._config.step_timeout_s)
        except Refused:
            tool = self._tools.get(call.name)
            message = explain(tool, call.arguments) if tool else "the environment refuses these arguments"
            return Observation("", error=ToolError("invalid_args", message))
        return self._shown(result)

    async def verify(self, final_answer: str | None, conversation: list[dict[str, Any]]) -> Reward:
        """See ``Environment.verify``."""
        if self._reward is None:
            try:
                self._reward = await self._score(final_answer, conversation)
            except EnvLost as lost:
                return Reward(None, f"session lost before the verdict: {lost}")
        return self._reward

    async def close(self) -> None:
        """See ``Environment.close``."""
        self._lost = self._lost or "closed"
        with contextlib.suppress(Exception):
            async with asyncio.timeout(self._config.close_timeout_s):
                await self._client.close()

    def _new_client(self) -> Any:
        config = self._config
        longest = max(config.reset_timeout_s, config.step_timeout_s, config.verify_timeout_s)
        # The deadlines below are the ones that count; the client's own must never come first.
        return one_socket_client()(
            base_url=self._url,
            connect_timeout_s=config.make_timeout_s + 1,
            message_timeout_s=longest + 1,
            headers=self._headers,
        )

    async def _list_tools(self) -> dict[str, dict[str, Any]]:
        """The server's tools by name; for one that takes an action, that alone."""
        interface = self._openenv.interface
        if interface != "action":
            try:
                listed = _checked(await self._client.step({"type": "list_tools"}))
            except RuntimeError as error:
                if interface == "mcp" or not _is_refusal(error):
                    raise
            else:
                return mcp_tools(listed.observation.get("tools") or ())
        tool = action_tool(await action_schema(self._url), self._openenv.action_tool)
        self._action = tool["function"]["name"]
        return {self._action: tool}

    async def _call(self, name: str, arguments: dict[str, Any], timeout_s: float) -> Any:
        """Call a tool, or act. Raises EnvLost, or Refused."""
        action = arguments
        if self._action is None:
            action = {"type": "call_tool", "tool_name": name, "arguments": arguments}

        async def request() -> Any:
            return _checked(await self._client.step(action))

        result = await self._within(timeout_s, name, request)
        self._rewards.append(result.reward)
        if result.done:
            self._last = result
        return result

    def _shown(self, result: Any) -> Observation:
        if self._action is not None:
            return Observation(json.dumps(_visible(result.observation), ensure_ascii=False), done=bool(result.done))
        error = _tool_error(result.observation)
        if error is not None:
            return Observation("", error=error, done=bool(result.done))
        content, images = read_content(result.observation.get("result"))
        return Observation(content, done=bool(result.done), images=images)

    async def _score(self, final_answer: str | None, conversation: list[dict[str, Any]]) -> Reward:
        """End the episode if nothing has, have it scored if a tool does that, and read the reward."""
        assert self._task is not None, "reset() comes first"
        tools = [] if self._last is not None else [self._openenv.finish_tool]
        last, scored = self._last, False
        for name in (*tools, self._openenv.verify_tool):
            if name is None:
                continue
            code = self._task.verifier_code
            arguments = finish_arguments(self._tools.get(name), final_answer, conversation, code)
            try:
                last = await self._call(name, arguments, self._config.verify_timeout_s)
            except Refused:
                return Reward(None, f"the environment does not take {name} with {sorted(arguments)}")
            error = _tool_error(last.observation)
            if error is not None:
                return Reward(None, f"the environment could not finish: {error.message}")
            scored = name == self._openenv.verify_tool
        openenv = self._openenv
        return verdict(openenv.reward, self._rewards, last, scored, openenv.unfinished_reward)

    async def _within(
        self, timeout_s: float, what: str, request: Callable[[], Awaitable[T]], starting: bool = False
    ) -> T:
        """Await one request with its deadline, and poison the session unless it succeeds or is refused."""
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
            if starting and is_busy(error):
                raise EnvBusy(self._lost) from error
            if not starting and _is_refusal(error):
                self._lost = None
                raise Refused(str(error)) from error
            raise EnvLost(self._lost) from error
        self._lost = None
        return answer


def _checked(result: Any) -> Any:
    """A reply that can be read. Raises TypeError for one that is no object, as a broken server or proxy sends."""
    if not isinstance(result.observation, dict):
        raise TypeError(f"the observation is no object but {result.observation!r:.80}")
    return result


def _is_refusal(error: Exception) -> bool:
    return isinstance(error, RuntimeError) and "(code: VALIDATION_ERROR)" in str(error)


def _tool_error(observation: dict[str, Any]) -> ToolError | None:
    error = observation.get("error")
    if error is None:
        message = error_text(observation.get("result"))
        return None if message is None else ToolError("execution_error", message)
    if not isinstance(error, dict):
        return ToolError("execution_error", str(error))
    kind = error.get("error_type")
    return ToolError(kind if kind in TOOL_ERROR_KINDS else "execution_error", str(error.get("message", "")))


def _visible(observation: dict[str, Any]) -> dict[str, Any]:
    """What an environment shows to who acts; ``metadata`` is for programs and may hold the solution."""
    return {name: value for name, value in observation.items() if name != "metadata"}


def _opening(prompt: str, observation: dict[str, Any]) -> str:
    """The task, and the first observation where there is one: a board, a question, a greeting."""
    shown = {name: value for name, value in _visible(observation).items() if value not in (None, "", [], {}, prompt)}
    return f"{prompt}\n\n{json.dumps(shown, ensure_ascii=False)}" if shown else prompt

"""Environment adapter for one episode behind any OpenEnv server."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import Awaitable, Callable, Collection, Iterable
from functools import cache
from typing import Any, TypeVar

from megatron_fleet.config.sections.env import EnvConfig, OpenEnvConfig
from megatron_fleet.data.task import Task
from megatron_fleet.envs.base import (
    EnvBusy,
    EnvLost,
    EnvRefused,
    Image,
    Observation,
    Reward,
    ToolCall,
    ToolError,
    cut_reason,
    is_busy,
)
from megatron_fleet.envs.content import read_fields
from megatron_fleet.envs.explanation import UNEXPLAINED, explain
from megatron_fleet.envs.openenv_client import action_schema, observation_schema, one_socket_client
from megatron_fleet.envs.openenv_replies import (
    NEVER_SHOWN,
    begun,
    checked,
    is_refusal,
    listed,
    metadata,
    raised,
    tool_error,
    tool_result,
    verdict,
    visible,
)
from megatron_fleet.envs.openenv_tools import (
    FINISH_TOOL,
    action_tool,
    calls_tools,
    described,
    final_arguments,
    finish_arguments,
    mcp_tools,
    reset_arguments,
)

T = TypeVar("T")
log = logging.getLogger(__name__)


class InvalidAction(Exception):
    """The server rejected the request's format; nothing happened and the session continues."""


class Raised(Exception):
    """The environment raised an exception on an action and reported its message; the session continues."""


class OpenEnvEnvironment:
    """The Environment protocol over one WebSocket session.

    The server either lists tools and calls them (as in the Model Context Protocol) or takes one action, whose schema
    becomes the only tool. A timeout, a transport error or a cancellation poisons the session, because the server's
    state is then unknown: every later call raises EnvLost.
    """

    def __init__(
        self, config: EnvConfig, url: str, openenv: OpenEnvConfig, episode: str | None = None, token: str = ""
    ) -> None:
        """
        Args:
            config: provides the deadlines.
            openenv: settings for this server.
            episode: the episode's name on the server; random by default.
            token: token that the server requires; empty: none.
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

        async def start() -> tuple[Any, list[str]]:
            shown = begun(checked(await self._client.reset(**arguments)))
            self._tools = await self._list_tools()
            return shown, await self._fields(shown)

        try:
            await self._within(self._config.make_timeout_s, "connect", self._client.connect, starting=True)
            shown, fields = await self._within(self._config.reset_timeout_s, "reset", start, starting=True)
        except EnvBusy:
            # The server refused this socket before anything happened: the next attempt gets a new one.
            await self.close()
            self._client, self._lost = self._new_client(), None
            raise
        try:
            self._check_hidden_fields(fields)
            content, images = self._opening(task.prompt, shown)
            return Observation(content, tools=self._offered(), images=images)
        except EnvLost as lost:
            self._lost = str(lost)
            raise

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
        except InvalidAction:
            tool = self._tools.get(call.name)
            message = explain(tool, call.arguments) if tool else UNEXPLAINED
            return Observation("", error=ToolError("invalid_args", message))
        except Raised as failure:
            return Observation("", error=ToolError("execution_error", str(failure)))
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
        # The deadlines in `_within` are authoritative; the client's own must never fire first.
        return one_socket_client()(
            base_url=self._url,
            connect_timeout_s=config.make_timeout_s + 1,
            message_timeout_s=longest + 1,
            headers=self._headers,
        )

    async def _list_tools(self) -> dict[str, dict[str, Any]]:
        """Return the server's tools by name, or only its action if it takes one."""
        refusal = None
        if self._openenv.interface != "action":
            try:
                return listed(checked(await self._client.step({"type": "list_tools"})))
            except RuntimeError as error:
                if not is_refusal(error):
                    raise
                refusal = error
        schema = await action_schema(self._url)
        if refusal is not None and calls_tools(schema):
            return mcp_tools(await self._client.list_tools())
        if refusal is not None and self._openenv.interface == "mcp":
            raise refusal
        tool = action_tool(schema, self._openenv.action_tool)
        self._action = tool["function"]["name"]
        return {self._action: tool}

    async def _fields(self, shown: Any) -> list[str]:
        """Return the names of the observations' fields: those of the reset's, and others in the server's schema.

        The schema is fetched only if the configuration hides a field that the reset does not show.
        """
        names = list(visible(shown, ()))
        if not set(self._openenv.hidden_fields) <= set(names):
            declared = (await observation_schema(self._url)).get("properties", {})
            names += [name for name in declared if name not in (*names, *NEVER_SHOWN)]
        return names

    def _check_hidden_fields(self, fields: Collection[str]) -> None:
        """Raise EnvRefused for a hidden field that no observation has: what should be hidden would be shown."""
        for name in self._openenv.hidden_fields:
            if name not in fields:
                raise EnvRefused(
                    f"env.openenv.hidden_fields={name}: the observations have no such field; they have {_names(fields)}"
                )

    def _offered(self) -> tuple[dict[str, Any], ...]:
        """Return the policy's tools. Raises EnvLost or EnvRefused."""
        openenv = self._openenv
        hidden = {"finish_tool": openenv.finish_tool, "verify_tool": openenv.verify_tool}
        for key, name in hidden.items():
            if name not in (None, FINISH_TOOL, *openenv.final_calls, *self._tools):
                raise EnvRefused(
                    f"env.openenv.{key}={name}: no such tool; the environment has {', '.join(self._tools)} "
                    f"(one that it does not list belongs into env.openenv.final_calls, with its arguments)"
                )
        offered = tuple(tool for name, tool in self._tools.items() if name not in hidden.values())
        # A question-answering server may have a single tool, for the final answer, and none for the policy.
        if not offered and openenv.finish_tool not in self._tools:
            raise EnvLost("the environment lists no tools")
        return described(offered, openenv.tool_descriptions)

    def _opening(self, prompt: str, shown: Any) -> tuple[str, tuple[Image, ...]]:
        """Return the task and the first observation, if any: a board, a question, a screen. Raises EnvRefused."""
        observation, hidden = visible(shown, self._openenv.hidden_fields), metadata(shown)
        for name in self._openenv.shown_metadata:
            if name not in hidden:
                raise EnvRefused(
                    f"env.openenv.shown_metadata={name}: the metadata of the reset observation has no such field; it "
                    f"has {_names(hidden)}, and shown without this key are {_names(observation)}"
                )
            observation[name] = hidden[name]
        fields = {name: value for name, value in observation.items() if value not in (None, "", [], {}, prompt)}
        text, images = read_fields(fields)
        return f"{prompt}\n\n{text}" if text else prompt, images

    async def _call(self, name: str, arguments: dict[str, Any], timeout_s: float) -> Any:
        """Call a tool or send an action. Raises EnvLost, InvalidAction or Raised."""
        action = arguments
        if self._action is None:
            action = {"type": "call_tool", "tool_name": name, "arguments": arguments}

        async def request() -> Any:
            return checked(await self._client.step(action))

        result = await self._within(timeout_s, name, request)
        self._rewards.append(result.reward)
        if result.done:
            self._last = result
        return result

    def _shown(self, reply: Any) -> Observation:
        done = bool(reply.done)
        hidden = self._openenv.hidden_fields
        if self._action is None and (error := tool_error(reply)):
            return Observation("", error=error, done=done)
        content, images = tool_result(reply, hidden) if self._action is None else read_fields(visible(reply, hidden))
        return Observation(content, done=done, images=images)

    async def _score(self, final_answer: str | None, conversation: list[dict[str, Any]]) -> Reward:
        """End the episode if it is still open, call the scoring tool if there is one, and read the reward."""
        assert self._task is not None, "reset() comes first"
        if self._lost is not None:
            raise EnvLost(self._lost)
        tools = [] if self._last is not None else [self._openenv.finish_tool]
        last, scored = self._last, False
        for name in (*tools, self._openenv.verify_tool):
            if name is None:
                continue
            arguments = self._final_arguments(name, self._task, final_answer, conversation)
            try:
                last = await self._call(name, arguments, self._config.verify_timeout_s)
            except InvalidAction:
                return Reward(None, f"the environment does not take {name} with {sorted(arguments)}")
            except Raised as failure:
                return Reward(None, f"the environment failed at {name}: {failure}")
            if error := tool_error(last):
                return Reward(None, f"the environment could not finish: {error.message}")
            scored = name == self._openenv.verify_tool
        openenv = self._openenv
        return verdict(openenv.reward, self._rewards, last, scored, openenv.unfinished_reward)

    def _final_arguments(
        self, name: str, task: Task, answer: str | None, conversation: list[dict[str, Any]]
    ) -> dict[str, Any]:
        given = self._openenv.final_calls.get(name)
        if given is not None:
            return final_arguments(given, task, answer)
        return finish_arguments(self._tools.get(name), answer, conversation, task.verifier_code)

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
            self._lost = cut_reason(f"{what}: {type(error).__name__}: {error}")
            if starting and is_busy(error):
                if "CAPACITY_REACHED" in str(error):
                    _warn_of_a_full_server(self._url, cut_reason(str(error)))
                raise EnvBusy(self._lost) from error
            if starting and is_refusal(error):
                raise EnvRefused(self._lost) from error
            if not starting and is_refusal(error):
                self._lost = None
                raise InvalidAction(str(error)) from error
            # Tools can report failures; an environment that takes an action can only raise, and the policy's own
            # mistakes must not lead to an unknown reward.
            if not starting and self._action is not None and (message := raised(error)) is not None:
                self._lost = None
                raise Raised(message) from error
            raise EnvLost(self._lost) from error
        self._lost = None
        return answer


@cache
def _warn_of_a_full_server(url: str, said: str) -> None:
    """Warn once per process and server: a run whose episodes queue for sessions works, but is rarely intended."""
    log.warning(
        "%s has no free session, so that episodes wait for each other (%s). Start it with more sessions, by "
        "MAX_CONCURRENT_ENVS where it reads that variable, or set rollout.episodes_in_flight to its number of "
        "sessions.",
        url,
        said,
    )


def _names(fields: Iterable[str]) -> str:
    return ", ".join(fields) or "none"

"""Environment adapter for one episode in a Fleet-hosted environment, through FleetTaskEnv of fleet-ai/OpenEnv.

FleetTaskEnv has behaviours that the Environment protocol does not allow; each workaround is explained next to its code.
Fleet runs verifiers on its own machines, but its client executes a verifier's source once to find the function in it,
so module-level code of a task file runs in this process: only use task files from people you trust.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import json
import re
import time
from collections.abc import Callable, Coroutine
from functools import partial
from importlib import import_module
from typing import Any, TypeVar

from megatron_fleet.config.sections.env import EnvConfig
from megatron_fleet.data.task import Task
from megatron_fleet.envs.base import EnvBusy, EnvLost, EnvRefused, Observation, Reward, ToolCall, ToolError, is_busy
from megatron_fleet.envs.content import read_content, score_of
from megatron_fleet.envs.fleet_package import give_threads, load_fleet_task_env
from megatron_fleet.envs.openenv_tools import FINISH_TOOL

T = TypeVar("T")

NO_LIMIT = 2**31
"""Disables FleetTaskEnv's own step limit, which would end and score an episode before the policy is done."""
CALL_MARGIN_S = 2.0
"""FleetTaskEnv stops retrying a tool this long before our deadline: the policy sees an error, the session survives."""
RETRY_CANCEL_S = 0.5
_JUDGE_ERROR = re.compile(r"^JUDGE ERROR:", re.MULTILINE)
"""Printed by Fleet's judge when its model could not be queried; the score that follows is made up."""
_NOT_A_NUMBER = "float() argument must be"
"""Part of FleetTaskEnv's error message for a verifier result that is an object."""


class FleetEnvironment:
    """The Environment protocol over one FleetTaskEnv.

    A missed deadline or a cancellation poisons the session: every later call raises EnvLost.
    """

    def __init__(self, config: EnvConfig) -> None:
        self._config = config
        self._task: Task | None = None
        self._env: Any = None
        self._made = 0.0
        self._late: set[asyncio.Task[Any]] = set()
        self._tools: frozenset[str] = frozenset()
        self._lost: str | None = None
        self._reward: Reward | None = None

    async def reset(self, task: Task) -> Observation:
        """See ``Environment.reset``."""
        if not task.verifier_code.strip():
            raise EnvRefused(f"task {task.key} has no verifier, and FleetTaskEnv would score it 0")
        give_threads(asyncio.get_running_loop())
        self._task = task
        if self._env is None:
            await self._make(task)
        tools = self._env._tools
        # Only what is left of the pause that an instance needs; FleetTaskEnv's own 8 s would come on top of retries.
        tools.initial_wait = max(0.0, min(tools.initial_wait, self._made + self._config.fleet.settle_s - _now()))
        tools.call_deadline_s = max(1.0, self._config.step_timeout_s - CALL_MARGIN_S)
        shown = await self._within(self._config.reset_timeout_s, "reset", self._env.reset_async)
        offered = tuple(tool for tool in shown["tools"] if tool["function"]["name"] != FINISH_TOOL)
        self._tools = frozenset(tool["function"]["name"] for tool in offered)
        screen, images = read_content(shown.get("initial_screenshot"))
        return Observation(f"{task.prompt}\n\n{screen}" if images else task.prompt, tools=offered, images=images)

    async def step(self, call: ToolCall) -> Observation:
        """See ``Environment.step``."""
        if self._lost is not None:
            raise EnvLost(self._lost)
        # FleetTaskEnv would spend half a minute on retries of a call that can never succeed.
        if not isinstance(call.arguments, dict):
            return Observation("", error=ToolError("invalid_args", "arguments must be a JSON object"))
        if call.name not in self._tools:
            return Observation("", error=ToolError("tool_not_found", f"no tool {call.name}"))
        action = {"tool": call.name, "params": call.arguments}
        limit = self._config.step_timeout_s
        _, _, done, info = await self._within(limit, call.name, lambda: self._env.step_async(action))
        failed = info.get("tool_error")
        if failed is not None or "tool_result" not in info:
            return Observation("", error=_tool_error(str(failed), "tool_result" in info), done=bool(done))
        # The observation's copy turns every empty result into {}.
        content, images = read_content(info["tool_result"])
        return Observation(content, done=bool(done), images=images)

    async def verify(self, final_answer: str | None, conversation: list[dict[str, Any]]) -> Reward:
        """See ``Environment.verify``. Ends the FleetTaskEnv's episode, which runs the verifier once."""
        if self._reward is None:
            if self._task is None or self._env is None or _instance(self._env) is None:
                return Reward(None, self._lost or "there is no instance to verify")
            try:
                self._reward = await self._within(
                    self._config.verify_timeout_s,
                    "verify",
                    partial(self._score, self._task, final_answer, conversation),
                )
            except EnvLost as lost:
                return Reward(None, f"session lost before the verdict: {lost}")
        return self._reward

    async def close(self) -> None:
        """See ``Environment.close``.

        The verifier does not run here: a finished episode was scored by ``verify``, and nobody reads the score of an
        abandoned one. FleetTaskEnv's own close would spend up to a minute on it.
        """
        self._lost = self._lost or "closed"
        env, self._env = self._env, None
        if env is None:
            return
        # Not cancelled when late: an instance that is not deleted occupies one of the team's slots until its TTL.
        await asyncio.wait({asyncio.create_task(_give_back(env, self._late))}, timeout=self._config.close_timeout_s)

    async def _make(self, task: Task) -> None:
        """Create the instance, which FleetTaskEnv would otherwise do within its reset."""
        fleet = self._config.fleet
        fleet_task_env = load_fleet_task_env(fleet)
        self._env = fleet_task_env(
            _fleet_task(task), ttl_seconds=fleet.ttl_s, max_steps=NO_LIMIT, partial_reward=fleet.partial_reward
        )
        try:
            await self._within(self._config.make_timeout_s, "make", self._env._ensure_provisioned)
        except EnvBusy:
            self._env, self._lost = None, None
            raise
        self._made = _now()

    async def _score(self, task: Task, final_answer: str | None, conversation: list[dict[str, Any]]) -> Reward:
        env = self._env
        env.conversation_messages = conversation
        # A submitted answer is passed to the verifier as final_answer whether or not it takes one.
        answered = final_answer is not None and "final_answer" in _verifier_arguments(task.verifier_code)
        action = {"tool": FINISH_TOOL, "params": {"answer": final_answer}} if answered else {"done": True}
        _, value, _, _ = await env.step_async(action)
        details = {"execution_id": env._last_verifier_execution_id}
        if value is not None:
            return Reward(float(value), "verified", details)
        reason = env.verifier_error or "the verifier could not be run"
        if _NOT_A_NUMBER in reason:
            return await _structured(env, task, {"final_answer": final_answer or ""} if answered else {}, conversation)
        return Reward(None, reason, details)

    async def _within(self, timeout_s: float, what: str, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Await ``work()`` with its deadline, and poison the session unless it succeeds.

        FleetMCPTools swallows cancellations, so a timeout around the coroutine would not end. It runs as a separate
        task, which is abandoned when it is late.
        """
        if self._lost is not None:
            raise EnvLost(self._lost)
        self._lost = f"{what} was interrupted"
        task = asyncio.create_task(work())
        try:
            await asyncio.wait({task}, timeout=timeout_s)
        finally:
            if not task.done():
                task.cancel()
                self._late.add(task)
        if task in self._late:
            self._lost = f"{what} took more than {timeout_s:g} s"
            raise EnvLost(self._lost)
        try:
            result = task.result()
        except (Exception, asyncio.CancelledError) as error:
            self._lost = f"{what}: {type(error).__name__}: {error}"
            if what == "make" and is_busy(error):
                raise EnvBusy(self._lost) from error
            raise EnvLost(self._lost) from error
        self._lost = None
        return result


def _now() -> float:
    return time.monotonic()


def _fleet_task(task: Task) -> dict[str, Any]:
    """Return the task under the names that FleetTaskEnv reads; some differ from those in exports."""
    return {
        "task_key": task.key,
        "prompt": task.prompt,
        "env_key": task.env_key,
        "env_version": task.env_version,
        "data_key": task.data_key,
        "data_version": task.data_version,
        "env_variables": task.env_variables or None,
        "verifier_code": task.verifier_code,
        "task_modality": task.modality,
    }


def _tool_error(message: str, answered: bool) -> ToolError:
    if answered:
        return ToolError("execution_error", message)
    return ToolError("tool_not_found" if "not found on any" in message else "transport_error", message)


def _verifier_arguments(code: str) -> frozenset[str]:
    """Return the verifier's parameter names, from the first function of the source, which Fleet's client calls."""
    try:
        body = ast.parse(code).body
    except SyntaxError:
        return frozenset()
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            given = node.args
            anything = frozenset({"final_answer", "conversation"}) if given.kwarg else frozenset()
            return anything | {a.arg for a in (*given.posonlyargs, *given.args, *given.kwonlyargs)}
    return frozenset()


async def _structured(env: Any, task: Task, answer: dict[str, str], conversation: list[dict[str, Any]]) -> Reward:
    """Rerun a verifier whose result FleetTaskEnv could not read: an object with the reward in ``score``."""
    remote = import_module("fleet._async.tasks").Task(
        key=task.key, prompt=task.prompt, env_id=task.env_key, verifier_func=task.verifier_code
    )
    arguments: dict[str, str] = dict(answer)
    if "conversation" in _verifier_arguments(task.verifier_code):
        arguments["conversation"] = json.dumps(conversation, default=str)
    try:
        response = await remote.verify_detailed_async(_instance(env), **arguments)
    except Exception as error:
        return Reward(None, f"the verifier could not be run: {type(error).__name__}: {error}")
    details = {"execution_id": response.execution_id}
    if not response.success:
        return Reward(None, "the verifier failed", details)
    if _JUDGE_ERROR.search(response.stdout or ""):
        return Reward(None, "the verifier's judge could not be reached", details)
    score = score_of(response.result)
    return Reward(score, "verified" if score is not None else "the verifier did not return a number", details)


def _instance(env: Any) -> Any:
    """Return the handle of a FleetTaskEnv's instance; ``None`` before its creation and after its deletion."""
    return getattr(env._orch, "_fleet_env", None)


async def _give_back(env: Any, late: set[asyncio.Task[Any]]) -> None:
    """Delete the instance, and also one that an abandoned creation still delivers."""
    env._rollout_completed_emitted = True  # else its telemetry reports a score of 0 for an abandoned episode
    await _delete(env)
    while pending := {task for task in late if not task.done()}:
        for task in pending:
            task.cancel()  # repeatedly: a cancellation is swallowed and a new attempt begins
        await asyncio.wait(pending, timeout=RETRY_CANCEL_S)
    for task in late:
        if not task.cancelled():
            task.exception()  # retrieved, so that asyncio does not complain
    await _delete(env)
    with contextlib.suppress(Exception):
        await env.close_async()


async def _delete(env: Any) -> None:
    instance = _instance(env)
    if instance is None:
        return
    # FleetTaskEnv's close calls this coroutine without awaiting it, and so deletes nothing.
    with contextlib.suppress(Exception):
        await instance.close()
    env._orch._fleet_env = None

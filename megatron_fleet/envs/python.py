"""Questions that a Python function of the user's own scores (``env.kind=python``), without tools or a server.

``python -m megatron_fleet.envs.python`` calls that function once, for `check_reward`.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any, Protocol

from megatron_fleet.config.errors import UserError
from megatron_fleet.config.extension import Interface, load, run_check
from megatron_fleet.config.sections.env import EnvConfig
from megatron_fleet.data.task import Task
from megatron_fleet.envs.base import Observation, Reward, ToolCall, ToolError

NO_TOOLS = "there are no tools here; write the answer as text"
_THREADS = ThreadPoolExecutor(32, "reward")
"""Threads of functions that are not ``async``, apart from those that encode prompts, so that slow ones delay no other
episode."""


class RewardFailed(Exception):
    """``env.reward`` gave no reward. The message says why."""


class RewardFunction(Protocol):
    def __call__(self, text: str, task: Task, /) -> float | None:
        """Return the reward of one episode, or ``None`` if it is not known. May be ``async``.

        Args:
            text: what the policy answered, see `answer_text`.
            task: with its private ``answer``.
        """
        ...


OWN_REWARD = Interface("env.reward", "reward function", RewardFunction, "episode workers", may_be_async=True)


class PythonEnvironment:
    """One question: the observation is the task's prompt, the reward is what ``env.reward`` returns."""

    def __init__(self, config: EnvConfig) -> None:
        """Raises UserError if ``env.reward`` cannot be loaded."""
        self._name, self._timeout_s = f"env.reward={config.reward}", config.verify_timeout_s
        self._score = load(OWN_REWARD, config.reward or "")
        self._task: Task | None = None

    async def reset(self, task: Task) -> Observation:
        """Return the prompt."""
        self._task = task
        return Observation(task.prompt)

    async def step(self, call: ToolCall) -> Observation:
        """Refuse every call."""
        return Observation("", error=ToolError("tool_not_found", NO_TOOLS))

    async def verify(self, final_answer: str | None, conversation: list[dict[str, Any]]) -> Reward:
        """Score the answer; the reward is unknown if the function fails."""
        try:
            value = await self.score(answer_text(final_answer, conversation))
        except RewardFailed as failed:
            return Reward(None, str(failed))
        return Reward(value, "" if value is not None else f"{self._name} returned None")

    async def score(self, text: str) -> float | None:
        """Call the function. Raises RewardFailed if it raises, is late, or returns neither a number nor ``None``."""
        assert self._task is not None, "reset() comes first"
        try:
            async with asyncio.timeout(self._timeout_s) as deadline:
                given = await self._called(text, self._task)
        except Exception as error:  # user code may raise anything
            if deadline.expired():
                raise RewardFailed(f"{self._name} returned nothing within {self._timeout_s:g} s") from None
            raise RewardFailed(f"{self._name} raised {type(error).__name__}: {error}") from error
        try:
            if isinstance(given, (str, bytes)):
                raise TypeError
            return None if given is None else float(given)
        except (TypeError, ValueError, OverflowError):
            raise RewardFailed(f"{self._name} returned a {type(given).__name__}; it must return a number") from None

    async def close(self) -> None:
        """Do nothing."""

    async def _called(self, text: str, task: Task) -> Any:
        if inspect.iscoroutinefunction(self._score):
            return await self._score(text, task)
        given = await asyncio.get_running_loop().run_in_executor(_THREADS, self._score, text, task)
        return await given if inspect.isawaitable(given) else given


def answer_text(final_answer: str | None, conversation: list[dict[str, Any]]) -> str:
    """Return what the policy answered: the text before ``<done>`` or the submitted answer; without one, its last turn
    after its thinking, which is empty if it was cut off while thinking."""
    if final_answer is not None:
        return final_answer
    turn = next((str(said["content"]) for said in reversed(conversation) if said["role"] == "assistant"), "")
    _, _, spoken = turn.rpartition("</think>")
    return spoken.partition("<think>")[0].strip()


def check_reward(config: EnvConfig, task: Task, python: str) -> None:
    """Call ``env.reward`` once as a worker does, with an empty text and ``task``. It gets no variable that looks like a
    secret, as in a worker.

    Args:
        python: interpreter of the episode workers.

    Raises:
        UserError: it raises, takes longer than ``env.verify_timeout_s``, or returns neither a number nor ``None``.
    """
    request = json.dumps({"env": config.model_dump(mode="json"), "task": asdict(task)})
    done = run_check([python, "-m", "megatron_fleet.envs.python"], f"env.reward={config.reward}: calling it", request)
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        raise UserError(
            f"env.reward={config.reward}: calling it ends Python with status {done.returncode}: {done.stderr[-300:]}"
        )
    if problem := json.loads(lines[-1])["problem"]:
        raise UserError(f"{problem}, called with an empty text and task {task.key}; correct it.")


def main() -> None:
    """Call the function that standard input names, and print the problem as JSON."""
    request = json.loads(sys.stdin.read())
    environment = PythonEnvironment(EnvConfig.model_validate(request["env"]))

    async def scored() -> str:
        await environment.reset(Task(**request["task"]))
        try:
            await environment.score("")
        except RewardFailed as failed:
            return str(failed)
        return ""

    print(json.dumps({"problem": asyncio.run(scored())}), flush=True)
    os._exit(0)  # without waiting for a function that does not return


if __name__ == "__main__":
    main()

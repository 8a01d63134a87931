"""Interpretation of an OpenEnv server's replies: the part visible to the policy, failures, refusals.

A reply is the ``StepResult`` of OpenEnv's untyped client: ``observation``, ``reward``, ``done``, ``metadata``.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any, Literal

from megatron_fleet.envs.base import Image, Reward, ToolError
from megatron_fleet.envs.content import error_text, known_number, read_content, read_fields, score_of
from megatron_fleet.envs.openenv_tools import mcp_tools

TOOL_ERROR_KINDS = frozenset({"tool_not_found", "invalid_args", "execution_error", "timeout", "transport_error"})

NEVER_SHOWN = ("reward", "done", "metadata")
"""Fields of every OpenEnv observation that the policy does not see, except for metadata named in the configuration."""


def checked(reply: Any) -> Any:
    """Return ``reply``. Raises TypeError if its observation is not an object, as from a broken server or proxy."""
    if not isinstance(reply.observation, dict):
        raise TypeError(f"the observation is not an object but {reply.observation!r:.80}")
    return reply


def begun(reply: Any) -> Any:
    """Return the reply to a reset. Raises RuntimeError if it reports a failure or an episode that is already over."""
    error = tool_error(reply)
    failure = metadata(reply).get("error") if error is None else error.message
    if failure or reply.done:
        raise RuntimeError(str(failure or "the environment ended the episode before the first action"))
    return reply


def listed(reply: Any) -> dict[str, dict[str, Any]]:
    """Return the tools by name. Raises RuntimeError if the server could not list them."""
    tools = reply.observation.get("tools") or ()
    failure = reply.observation.get("error") or metadata(reply).get("error")
    if failure and not tools:
        raise RuntimeError(f"the environment could not list its tools: {failure}")
    return mcp_tools(tools)


def metadata(reply: Any) -> dict[str, Any]:
    """Return the metadata, which may hold the solution; servers put it inside the observation or next to it."""
    return reply.observation.get("metadata") or reply.metadata or {}


def visible(reply: Any, hidden: Collection[str]) -> dict[str, Any]:
    """Return the part of the observation that the policy may see: neither metadata nor ``hidden`` fields."""
    return {name: value for name, value in reply.observation.items() if name != "metadata" and name not in hidden}


def tool_error(reply: Any) -> ToolError | None:
    """Return the error of a failed tool, or ``None`` if it did not fail."""
    error = reply.observation.get("error")
    if not error:
        message = error_text(reply.observation.get("result"))
        return None if message is None else ToolError("execution_error", message)
    if not isinstance(error, dict):
        return ToolError("execution_error", str(error))
    kind = error.get("error_type")
    if not isinstance(kind, str) or kind not in TOOL_ERROR_KINDS:
        kind = "execution_error"
    return ToolError(kind, str(error.get("message", "")))


def tool_result(reply: Any, hidden: Collection[str]) -> tuple[str, tuple[Image, ...]]:
    """Return a successful tool's result as text and images; an observation without ``result`` as JSON.

    ``hidden``: fields of the observation that the policy does not see.
    """
    if "result" in reply.observation and "result" not in hidden:
        return read_content(reply.observation["result"])
    fields = {name: value for name, value in visible(reply, hidden).items() if name not in ("tool_name", "error")}
    return read_fields({name: value for name, value in fields.items() if value is not None})


def is_refusal(error: Exception) -> bool:
    """Return whether the server rejected the request's format; nothing happened and the session continues."""
    return isinstance(error, RuntimeError) and "(code: VALIDATION_ERROR)" in str(error)


def raised(error: Exception) -> str | None:
    """Return the message of an exception raised by the environment that the session survives, else ``None``."""
    said, mark, _ = str(error).partition(" (code: EXECUTION_ERROR)")
    return said.removeprefix("Server error: ") if mark and isinstance(error, RuntimeError) else None


def verdict(
    source: Literal["finish", "last", "sum"], given: Sequence[Any], last: Any, scored: bool, unfinished: float | None
) -> Reward:
    """Return the episode's reward: the environment's, or ``unfinished`` if the policy stopped early; else unknown.

    Args:
        source: origin of the reward, see ``env.openenv.reward``.
        given: reward of every step, in order; ``None`` for a step without one.
        last: the step that ended or scored the episode, ``None`` when there was none.
        scored: ``last`` is the reply of a scoring tool, whose result may then hold the score.
        unfinished: reward of a policy that did nothing, or stopped before the end.
    """
    if not given and last is None:
        return Reward(unfinished, "the policy did not act")
    if source != "finish" and not scored:
        known = [value for value in map(known_number, given) if value is not None]
        if not known:
            return Reward(None, "no step gave a reward")
        return Reward(known[-1] if source == "last" else math.fsum(known), f"{source} of {len(known)} rewards")
    if last is None:
        return Reward(unfinished, "the policy stopped before the environment ended the episode")
    result = last.observation.get("result")
    value = known_number(last.reward)
    if value is None and scored:
        value = score_of(result)
    reason = str(result.get("reason", "")) if isinstance(result, dict) else ""
    return Reward(value, reason or ("" if value is not None else "the environment gave no reward"))

"""What an OpenEnv server's replies say: what the policy may see of them, failures, refusals.

A reply is OpenEnv's ``StepResult`` of a client without types: ``observation``, ``reward``, ``done``, ``metadata``.
"""

from __future__ import annotations

import json
from typing import Any

from megatron_fleet.envs.base import Image, ToolError
from megatron_fleet.envs.content import error_text, read_content
from megatron_fleet.envs.openenv_tools import mcp_tools

TOOL_ERROR_KINDS = frozenset({"tool_not_found", "invalid_args", "execution_error", "timeout", "transport_error"})


def checked(reply: Any) -> Any:
    """A reply that can be read. Raises TypeError for one that is no object, as a broken server or proxy sends."""
    if not isinstance(reply.observation, dict):
        raise TypeError(f"the observation is no object but {reply.observation!r:.80}")
    return reply


def begun(reply: Any) -> Any:
    """A reset's reply. Raises RuntimeError for one that tells a failure, or that the episode is over already."""
    error = tool_error(reply)
    failure = metadata(reply).get("error") if error is None else error.message
    if failure or reply.done:
        raise RuntimeError(str(failure or "the environment ended the episode before the first action"))
    return reply


def listed(reply: Any) -> dict[str, dict[str, Any]]:
    """Tools by name. Raises RuntimeError for a server that could not list them."""
    tools = reply.observation.get("tools") or ()
    failure = reply.observation.get("error") or metadata(reply).get("error")
    if failure and not tools:
        raise RuntimeError(f"the environment could not list its tools: {failure}")
    return mcp_tools(tools)


def metadata(reply: Any) -> dict[str, Any]:
    """What is for programs and may hold the solution; servers put it inside of the observation or next to it."""
    return reply.observation.get("metadata") or reply.metadata or {}


def visible(reply: Any) -> dict[str, Any]:
    """What an environment shows to who acts."""
    return {name: value for name, value in reply.observation.items() if name != "metadata"}


def tool_error(reply: Any) -> ToolError | None:
    """What a tool that failed says; ``None``: it did not."""
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


def tool_result(reply: Any) -> tuple[str, tuple[Image, ...]]:
    """What a tool that did not fail returned, as text and images; an observation without ``result`` as JSON."""
    if "result" in reply.observation:
        return read_content(reply.observation["result"])
    told = {name: value for name, value in visible(reply).items() if name not in ("tool_name", "error")}
    told = {name: value for name, value in told.items() if value is not None}
    return json.dumps(told, ensure_ascii=False) if told else "", ()


def is_refusal(error: Exception) -> bool:
    """Whether the server did not take a request's form; nothing happened and the session goes on."""
    return isinstance(error, RuntimeError) and "(code: VALIDATION_ERROR)" in str(error)


def raised(error: Exception) -> str | None:
    """The message of an exception that the environment raised and after which the session goes on; ``None`` without."""
    said, mark, _ = str(error).partition(" (code: EXECUTION_ERROR)")
    return said.removeprefix("Server error: ") if mark and isinstance(error, RuntimeError) else None

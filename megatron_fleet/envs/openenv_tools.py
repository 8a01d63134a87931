"""Tools of an OpenEnv server in the policy's format: MCP tools, or its action as the only tool."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from megatron_fleet.data.task import Task
from megatron_fleet.envs.base import EnvRefused

Schema = dict[str, Any]
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_-]+")
FINISH_TOOL = "submit_final_answer"
"""Tool that ends an episode on Fleet's servers, which accept it without listing it."""


def openai_tool(name: str, description: str | None, parameters: Schema | None) -> dict[str, Any]:
    """Build a tool in OpenAI function format; ``parameters`` is its JSON schema, ``None`` for none.

    Raises:
        ValueError: the name is not a string, or the schema is not that of an object.
    """
    schema = parameters or {"type": "object", "properties": {}}
    properties = schema.get("properties") or {} if isinstance(schema, dict) else None
    if not isinstance(name, str) or not isinstance(properties, dict):
        raise ValueError(f"tool {name!r:.60}: its name is not text, or its parameters are not a schema of an object")
    if not all(isinstance(inner, dict | bool) for inner in properties.values()):
        raise ValueError(f"tool {name:.60}: a parameter has no schema")
    return {"type": "function", "function": {"name": name, "description": description or "", "parameters": schema}}


def mcp_tools(listed: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Map names to tools in OpenAI format, in the server's order.

    OpenEnv spells the schema ``input_schema``, MCP ``inputSchema``.
    """
    return {
        tool["name"]: openai_tool(
            tool["name"], tool.get("description"), tool.get("input_schema") or tool.get("inputSchema")
        )
        for tool in listed
    }


def action_tool(schema: Schema, name: str | None) -> dict[str, Any]:
    """Build the tool that takes an environment's action.

    Args:
        schema: JSON schema of the action, as returned by ``/schema``.
        name: name of the tool; by default the schema's title.
    """
    # Every OpenEnv action has metadata, which is meant for programs.
    properties = {key: value for key, value in (schema.get("properties") or {}).items() if key != "metadata"}
    kept = {key: value for key, value in schema.items() if key not in ("title", "description", "properties")}
    title = _NOT_IN_NAMES.sub("_", str(schema.get("title") or "")).strip("_")
    return openai_tool(
        name or title or "act", schema.get("description"), {"type": "object", **kept, "properties": properties}
    )


def described(tools: Iterable[dict[str, Any]], descriptions: Mapping[str, str]) -> tuple[dict[str, Any], ...]:
    """Return ``tools`` in OpenAI format with the ``descriptions``, by name, in place of the server's.

    Raises:
        EnvRefused: a description is for a tool that is not among them.
    """
    by_name = {tool["function"]["name"]: tool for tool in tools}
    for name, text in descriptions.items():
        if name not in by_name:
            raise EnvRefused(
                f"env.openenv.tool_descriptions={name}: the policy has no such tool; it has "
                f"{', '.join(by_name) or 'none'}"
            )
        by_name[name] = by_name[name] | {"function": by_name[name]["function"] | {"description": text}}
    return tuple(by_name.values())


def calls_tools(schema: Schema) -> bool:
    """Return whether the action with this JSON schema is a tool call: OpenEnv's CallToolAction, or a subclass.

    A server supports the ``list_tools`` action only if its action class is CallToolAction itself.
    """
    properties = schema.get("properties") or {}
    kind = properties.get("type") or {}
    return "tool_name" in properties and "call_tool" in (kind.get("const"), kind.get("default"))


def finish_arguments(
    tool: Mapping[str, Any] | None, answer: str | None, conversation: list[dict[str, Any]], verifier_code: str
) -> dict[str, Any]:
    """Build the arguments of the tool that ends an episode: answer and conversation, if it has parameters for them.

    Args:
        tool: ``None`` when the server does not list it. It is then Fleet's tool, which gets ``answer`` always and
            ``conversation`` if the verifier's code mentions it.
    """
    if tool is None:
        said = {"conversation": conversation} if "conversation" in verifier_code else {}
        return {"answer": answer} | said
    parameters = tool["function"]["parameters"]
    properties: dict[str, Any] = parameters.get("properties") or {}
    place = "answer" if "answer" in properties else None
    texts = [name for name, schema in properties.items() if isinstance(schema, dict) and schema.get("type") == "string"]
    if place is None and len(texts) == 1 and texts[0] != "conversation":
        place = texts[0]
    arguments: dict[str, Any] = {}
    if place is not None and (answer is not None or place in parameters.get("required", ())):
        arguments[place] = answer or ""
    if "conversation" in properties:
        arguments["conversation"] = conversation
    return arguments


def final_arguments(given: Mapping[str, Any], task: Task, answer: str | None) -> dict[str, Any]:
    """Build the arguments of a call from ``env.openenv.final_calls``.

    ``task:FIELD`` works as in `reset_arguments`; ``episode:final_answer`` stands for ``answer``. Missing values are
    left out.
    """
    return _filled(given, {"task": _fields(task), "episode": {"final_answer": answer}})


def reset_arguments(task: Task, episode_id: str, extra: Mapping[str, Any]) -> dict[str, Any]:
    """Build the arguments of ``reset``: the task, and ``extra``.

    In ``extra``, ``task:FIELD`` and ``task:env_variables.NAME`` stand for values of the task. A server takes the
    arguments that its ``reset`` has parameters for. Values missing from the task are left out.
    """
    fields = _fields(task)
    return {"episode_id": episode_id, **fields} | _filled(extra, {"task": fields})


def _fields(task: Task) -> dict[str, Any]:
    return {
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


def _filled(value: Any, known: Mapping[str, Any]) -> Any:
    """Resolve references ``NAME:PATH`` into ``known``, at any depth of nested objects in ``value``."""
    if isinstance(value, Mapping):
        given = {name: _filled(inner, known) for name, inner in value.items()}
        return {name: inner for name, inner in given.items() if inner is not None}
    name, colon, path = value.partition(":") if isinstance(value, str) else ("", "", "")
    if not colon or name not in known:
        return value
    found: Any = known[name]
    for part in path.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found

"""What an OpenEnv server offers, as tools for a policy: MCP tools, or its action as the one tool."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from megatron_fleet.data.task import Task

Schema = dict[str, Any]
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_-]+")
_REFERENCE = "task:"
FINISH_TOOL = "submit_final_answer"
"""Ends an episode of Fleet's servers, which take it without listing it."""


def openai_tool(name: str, description: str | None, parameters: Schema | None) -> dict[str, Any]:
    """A tool in OpenAI function format; ``parameters`` is its JSON schema, ``None`` for none."""
    schema = parameters or {"type": "object", "properties": {}}
    return {"type": "function", "function": {"name": name, "description": description or "", "parameters": schema}}


def mcp_tools(listed: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Name → tool in OpenAI format, in the server's order; ``input_schema`` is OpenEnv's spelling, the other MCP's."""
    return {
        tool["name"]: openai_tool(
            tool["name"], tool.get("description"), tool.get("input_schema") or tool.get("inputSchema")
        )
        for tool in listed
    }


def action_tool(schema: Schema, name: str | None) -> dict[str, Any]:
    """The tool that takes an environment's action.

    Args:
        schema: JSON schema of the action, as ``/schema`` gives it.
        name: of the tool; by default the schema's title.
    """
    # Every OpenEnv action has it, for remarks of programs.
    properties = {key: value for key, value in (schema.get("properties") or {}).items() if key != "metadata"}
    kept = {key: value for key, value in schema.items() if key not in ("title", "description", "properties")}
    title = _NOT_IN_NAMES.sub("_", str(schema.get("title") or "")).strip("_")
    return openai_tool(
        name or title or "act", schema.get("description"), {"type": "object", **kept, "properties": properties}
    )


def explain(tool: Mapping[str, Any], arguments: Mapping[str, Any]) -> str:
    """What a schema has against ``arguments`` that the server refused without saying why."""
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import best_match

    error = best_match(Draft202012Validator(tool["function"]["parameters"]).iter_errors(arguments))
    if error is None:
        return "the environment refuses these arguments"
    return f"{error.json_path.removeprefix('$.')}: {error.message}" if error.path else error.message


def finish_arguments(
    tool: Mapping[str, Any] | None, answer: str | None, conversation: list[dict[str, Any]], verifier_code: str
) -> dict[str, Any]:
    """Arguments of the tool that ends an episode: the answer and the conversation where it has a place for them.

    Args:
        tool: ``None`` when the server does not list it. It then is Fleet's: ``answer`` always, ``conversation`` when
            the verifier speaks of it.
    """
    if tool is None:
        said = {"conversation": conversation} if "conversation" in verifier_code else {}
        return {"answer": answer} | said
    parameters = tool["function"]["parameters"]
    properties: dict[str, Any] = parameters.get("properties") or {}
    place = "answer" if "answer" in properties else None
    texts = [name for name, schema in properties.items() if schema.get("type") == "string"]
    if place is None and len(texts) == 1 and texts[0] != "conversation":
        place = texts[0]
    arguments: dict[str, Any] = {}
    if place is not None and (answer is not None or place in parameters.get("required", ())):
        arguments[place] = answer or ""
    if "conversation" in properties:
        arguments["conversation"] = conversation
    return arguments


def reset_arguments(task: Task, episode_id: str, extra: Mapping[str, Any]) -> dict[str, Any]:
    """What ``reset`` is called with: the task, and ``extra``, of which ``task:FIELD`` and ``task:env_variables.NAME``
    stand for values of the task.

    A server takes those that its ``reset`` has names for. What the task does not have is left out.
    """
    fields: dict[str, Any] = {
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
    return {"episode_id": episode_id, **fields} | _of_task(extra, fields)


def _of_task(value: Any, fields: Mapping[str, Any]) -> Any:
    if isinstance(value, Mapping):
        given = {name: _of_task(inner, fields) for name, inner in value.items()}
        return {name: inner for name, inner in given.items() if inner is not None}
    if not isinstance(value, str) or not value.startswith(_REFERENCE):
        return value
    found: Any = fields
    for part in value.removeprefix(_REFERENCE).split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found

"""Tools that the agent answers itself, by configuration; their calls never reach the environment."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from megatron_fleet.agents.builder import TrajectoryBuilder
from megatron_fleet.agents.outputs import ToolOutputs, listed, matches
from megatron_fleet.config.sections.agent import AgentConfig
from megatron_fleet.envs.base import ToolCall
from megatron_fleet.models.chat.renderer import to_json

FINISH = "submit_final_answer"
_TEXT, _COUNT = {"type": "string"}, {"type": "integer", "minimum": 1}
_PAGING = ("view_tool_output", "search_tool_output")
_CONTEXT = ("check_context", "manage_context", "search_history")


def _tool(name: str, description: str, properties: Mapping[str, Any], required: Sequence[str]) -> dict[str, Any]:
    parameters = {"type": "object", "properties": dict(properties), "required": list(required)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


_TOOLS = {
    tool["function"]["name"]: tool
    for tool in (
        _tool(FINISH, "Give the final answer; this ends the task.", {"answer": _TEXT}, ["answer"]),
        _tool(
            "view_tool_output", "Show a page of a result that was cut.", {"id": _COUNT, "page": _COUNT}, ["id", "page"]
        ),
        _tool(
            "search_tool_output",
            "Find text in results that were cut, or in the one with this id.",
            {"pattern": _TEXT, "id": _COUNT},
            ["pattern"],
        ),
        _tool("check_context", "Tell how much of the context and of the turns is used.", {}, []),
        _tool(
            "manage_context",
            "Free context: remove all earlier turns but the newest ones. The task and this turn stay.",
            {"keep_recent_turns": {"type": "integer", "minimum": 0}},
            ["keep_recent_turns"],
        ),
        _tool(
            "search_history", "Find text in this conversation, removed turns included.", {"pattern": _TEXT}, ["pattern"]
        ),
    )
}


def offered(agent: AgentConfig) -> tuple[dict[str, Any], ...]:
    """Return the definitions (OpenAI function format) of the tools enabled by the configuration."""
    names = (FINISH,) * (agent.finish == "tool") + _PAGING * agent.paging + _CONTEXT * agent.context_tools
    return tuple(_TOOLS[name] for name in names)


class BadArguments(ValueError):
    """Invalid arguments of a call; the message is shown to the policy."""


class Rewritable(Protocol):
    """A conversation whose earlier turns can be left out (``History.remove_before``)."""

    def remove_before(self, keep: int) -> int: ...


class LocalTools:
    """Answers calls of the offered tools for one episode."""

    def __init__(
        self,
        agent: AgentConfig,
        outputs: ToolOutputs,
        history: Rewritable,
        builder: TrajectoryBuilder,
        status: Callable[[int], str],
    ) -> None:
        """``status``: describes context usage for a number of tokens, as the reply of check_context."""
        self._outputs, self._history, self._builder = outputs, history, builder
        self._names = {tool["function"]["name"] for tool in offered(agent)}
        self._answers: dict[str, Callable[[Mapping[str, Any]], str]] = {
            FINISH: self._not_finished,
            "view_tool_output": lambda a: self._outputs.page(_count(a, "id"), _count(a, "page")),
            "search_tool_output": self._search_output,
            "check_context": lambda a: status(len(builder.ids)),
            "manage_context": self._manage,
            "search_history": self._search_history,
        }

    def has(self, name: str) -> bool:
        """Return whether a call of ``name`` is answered here."""
        return name in self._names

    def final_answer(self, calls: Sequence[ToolCall]) -> str | None:
        """Return the answer if the turn only submitted it."""
        if len(calls) != 1 or calls[0].name != FINISH or not self.has(FINISH) or "answer" not in calls[0].arguments:
            return None
        answer = calls[0].arguments["answer"]
        return answer if isinstance(answer, str) else to_json(answer)

    def answer(self, call: ToolCall) -> str:
        """Return the result, or a message on what is wrong with the call."""
        self._builder.count("local_tool_calls")
        try:
            return self._answers[call.name](call.arguments)
        except (BadArguments, LookupError) as problem:
            return f"Error (invalid_args): {problem.args[0]}"

    def _not_finished(self, arguments: Mapping[str, Any]) -> str:
        if "answer" not in arguments:
            raise BadArguments("answer is missing")
        raise BadArguments("not taken: submit the answer alone, when you have seen the results of all other calls")

    def _search_output(self, arguments: Mapping[str, Any]) -> str:
        number = _count(arguments, "id") if arguments.get("id") is not None else None
        return self._outputs.search(_pattern(arguments), number)

    def _manage(self, arguments: Mapping[str, Any]) -> str:
        removed = self._history.remove_before(_count(arguments, "keep_recent_turns", least=0))
        return f"Turns removed: {removed}." if removed else "Nothing to remove."

    def _search_history(self, arguments: Mapping[str, Any]) -> str:
        pattern, turn, places = _pattern(arguments), 0, []
        for message in self._builder.messages:
            turn += message["role"] == "assistant"
            if turn == self._builder.turns:  # the call itself
                break
            places.append((f"turn {turn}, {message['role']}", message["content"]))
        return listed((where, snippet) for where, text in places for _, snippet in matches(text, pattern))


def _count(arguments: Mapping[str, Any], name: str, least: int = 1) -> int:
    value = arguments.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise BadArguments(f"{name} must be an integer of at least {least}")
    return value


def _pattern(arguments: Mapping[str, Any]) -> str:
    value = arguments.get("pattern")
    if not isinstance(value, str) or not value.strip():
        raise BadArguments("pattern must be a text that is not empty")
    return value

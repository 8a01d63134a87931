"""Tools that the agent answers itself, by configuration; their calls never reach the environment."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from megatron_fleet.agents.builder import TrajectoryBuilder
from megatron_fleet.agents.history import History
from megatron_fleet.config.sections.agent import AgentConfig
from megatron_fleet.envs.base import ToolCall
from megatron_fleet.models.chat.renderer import to_json

FINISH = "submit_final_answer"
MAX_KEPT_CHARS, MAX_EPISODE_CHARS = 1_000_000, 4_000_000
"""Limits per result and per episode: a worker holds hundreds of episodes, and a policy reads only a few pages."""
MAX_MATCHES = 10
SNIPPET_CHARS = 80
"""Context shown on either side of a match."""
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


class ToolOutputs:
    """Cuts long results and keeps them, of an episode's results the newest. Results are numbered from 1 and have pages,
    as long as a cut result.
    """

    def __init__(self, page_chars: int, paging: bool) -> None:
        """``paging``: the policy can request pages, so a cut result is kept and says how to see more."""
        self._page_chars, self._paging = page_chars, paging
        self._kept: list[str] = []
        self._forgotten = 0  # number of leading results that are no longer kept

    def cut(self, text: str) -> tuple[str, bool]:
        """Return the text to show of a result, and whether it was cut."""
        if len(text) <= self._page_chars:
            return text, False
        shown = text[: self._page_chars]
        if not self._paging:
            return f"{shown}\n[cut: {self._page_chars} of {len(text)} characters shown]", True
        self._kept.append(text[:MAX_KEPT_CHARS])
        while sum(map(len, self._kept)) > MAX_EPISODE_CHARS:
            self._kept[self._forgotten] = ""
            self._forgotten += 1
        number = len(self._kept)
        more = f"view_tool_output(id={number}, page=2) shows more"
        return f"{shown}\n[cut: page 1 of {self._pages(number)} of output {number}; {more}]", True

    def page(self, number: int, page: int) -> str:
        """Return one page of a kept result. Raises LookupError with a message for the policy."""
        self._check(number)
        if not 1 <= page <= self._pages(number):
            raise LookupError(f"output {number} has the pages 1 to {self._pages(number)}")
        start = (page - 1) * self._page_chars
        text = self._kept[number - 1][start : start + self._page_chars]
        return f"[page {page} of {self._pages(number)} of output {number}]\n{text}"

    def search(self, pattern: str, number: int | None) -> str:
        """Find ``pattern`` in all kept results, or in one. Raises LookupError when that one does not exist."""
        if number is not None:
            self._check(number)
        numbers = range(1, len(self._kept) + 1) if number is None else (number,)
        return listed(
            (f"output {n}, page {place // self._page_chars + 1}", snippet)
            for n in numbers
            for place, snippet in matches(self._kept[n - 1], pattern)
        )

    def _check(self, number: int) -> None:
        if not 1 <= number <= len(self._kept):
            known = f"; ids are 1 to {len(self._kept)}" if self._kept else "; nothing was cut yet"
            raise LookupError(f"there is no output {number}{known}")
        if number <= self._forgotten:
            raise LookupError(f"output {number} is no longer kept; call the tool again")

    def _pages(self, number: int) -> int:
        return -(-len(self._kept[number - 1]) // self._page_chars)


def matches(text: str, pattern: str) -> Iterator[tuple[int, str]]:
    """Yield the positions of ``pattern`` in ``text``, ignoring case, each with its surroundings on one line.

    The pattern is plain text and the search takes linear time: a regular expression from the policy, or a repetitive
    pattern, could keep the process busy for hours.
    """
    lowered, pattern = _lower(text), _lower(pattern)
    place = lowered.find(pattern)
    while place >= 0:
        end = place + len(pattern)
        yield place, " ".join(text[max(0, place - SNIPPET_CHARS) : end + SNIPPET_CHARS].split())
        place = lowered.find(pattern, end + SNIPPET_CHARS)


def _lower(text: str) -> str:
    """Lower-case ``text`` without moving characters: U+0130, the only one that would become two, is replaced."""
    return text.replace("\u0130", "\0").lower()


def listed(found: Iterable[tuple[str, str]]) -> str:
    """Format the first matches, one per line, each prefixed with its location."""
    lines = [f"{where}: {snippet}" for (where, snippet), _ in zip(found, range(MAX_MATCHES + 1), strict=False)]
    if len(lines) > MAX_MATCHES:
        lines[-1] = "[more matches; search for something longer]"
    return "\n".join(lines) or "No match."


class BadArguments(ValueError):
    """Invalid arguments of a call; the message is shown to the policy."""


class LocalTools:
    """Answers calls of the offered tools for one episode."""

    def __init__(
        self,
        agent: AgentConfig,
        outputs: ToolOutputs,
        history: History[Any],
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

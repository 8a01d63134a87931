"""Failure taxonomy of episodes: a fixed list of categories, each with its rule. An episode may be in several."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from megatron_fleet.agents.trajectory import Outcome
from megatron_fleet.analysis.episodes import Episode

LOOP = 3
"""Repetitions of the same action (ignoring thinking) in one episode that count as a loop."""
_HOUSE_ERROR = re.compile(
    r"^Error \((tool_not_found|invalid_args|execution_error|timeout|transport_error)\): ?(.*)", re.MULTILINE | re.DOTALL
)
_PLAIN_ERROR = re.compile(
    r"\s*(?:[A-Z]\w*(?:Error|Exception):|(?i:error)(?:\s*:|(?=\s+\d{3}\b)|\s+(?:executing|calling) tool [^:\n]+:))(.*)",
    re.DOTALL,
)
_KINDS = {
    "invalid_args": "arguments",
    "tool_not_found": "unknown_tool",
    "timeout": "timeout",
    "transport_error": "server",
}
SEARCHED = 500
"""Leading characters of a message that the patterns are applied to; the rest may quote anything."""


def _status(codes: str) -> str:
    """Return a regex for one of ``codes`` in the position of a status code, not anywhere in a text."""
    return rf"(?:^|http|status|code|error)\W{{0,3}}(?:code\W{{0,3}})?(?:{codes})\b"


# The first match counts, so messages of pydantic, JSON Schema, JSON-RPC, SQL and HTTP come before generic words.
_PATTERNS = tuple(
    (name, re.compile("|".join(alternatives), re.IGNORECASE))
    for name, alternatives in (
        ("unknown_tool", (r"unknown tool", r"no (?:such )?tool\b", r"\btool \S+ (?:was )?not found", r"-32601")),
        (
            "arguments",
            (
                r"validation",
                r"field required|required property|inputs? (?:is|are) not permitted|\binput should be",
                r"unexpected keyword|missing \d+ required|not a valid|invalid literal|-32602|\bsyntax error",
            ),
        ),
        (
            "authorisation",
            (
                r"unauthori[sz]ed|unauthenticated|forbidden|not (?:authori[sz]ed|allowed|logged in|signed in)",
                r"(?:permission|access) denied|operation not permitted|not permitted to",
                r"insufficient (?:permission|privilege|scope|right)",
                r"(?:not|n't|no|without|lacks?) (?:have )?(?:\w+ )?(?:permission|privileges?|access to)\b",
                r"authentication (?:required|failed)|(?:invalid|expired|missing) (?:token|credential|api key|session)",
                r"(?:token|session|credentials?) (?:has |have |is |are )?expired",
                r"\bonly (?:\w+ )?(?:owner|admin\w*|author|member|manager)s? (?:can|may)\b",
                _status("40[13]"),
            ),
        ),
        (
            "not_found",
            (
                r"not[ _]?found|no such|(?:does not|doesn't|do not|don't) exist",
                r"(?:could not|couldn't|cannot|can't|unable to) (?:find|locate)",
                r"unknown (?:id|key|name|record|user)|^no (?:results?|match(?:es)?|records?|rows?)\b",
                r"^no [\w ]+ (?:with|named|called|matching)\b|^no \w+ [\w-]+$",
                _status("404|410"),
            ),
        ),
        ("timeout", (r"time[d -]*out|deadline",)),
        (
            "server",
            (
                r"rate.?limit|too many requests|internal (?:server )?error|(?:temporarily|service) unavailable",
                r"bad gateway|database is locked|connection (?:reset|refused|closed|aborted)|broken pipe",
                _status(r"429|5\d\d"),
            ),
        ),
        (
            "arguments",
            (
                r"(?:missing|required|unexpected|unknown|bad|unsupported|malformed) (?:\w+ )?"
                r"(?:argument|param|field|property|value|input|request|column)",
                r"\binvalid|(?:is|are) required|must (?:be|have|not|contain)|expected .{1,40}(?:got|but)\b",
                _status("400|422"),
            ),
        ),
    )
)


@dataclass(frozen=True, slots=True)
class Category:
    """Failure category.

    ``evidence`` returns a short text for an episode that belongs to it, else ``None``, given the episode and its tool
    errors by category (the first of each).
    """

    key: str
    label: str
    rule: str
    evidence: Callable[[Episode, Mapping[str, str]], str | None]


def tool_errors(episode: Episode) -> list[tuple[str, str]]:
    """Return ``(category, message)`` of each tool result that is an error; merely mentioning one does not count."""
    found = []
    for role, text in episode.messages:
        if role == "tool" and (error := _tool_error(text)) is not None:
            found.append((_classify(*error), error[1].strip()[:300]))
    return found


def longest_repetition(episode: Episode) -> tuple[int, str]:
    """Return the count and the text of the most frequent action of this episode, ignoring thinking."""
    actions = Counter(_action(text) for role, text in episode.messages if role == "assistant")
    actions.pop("", None)
    return max(((count, text) for text, count in actions.items()), default=(0, ""))


def _action(text: str) -> str:
    return text.rpartition("</think>")[2].strip()


def _tool_error(text: str) -> tuple[str, str] | None:
    """Return kind (empty when the text does not name one) and message, or ``None`` if it is not an error."""
    if house := _HOUSE_ERROR.search(text):
        return house[1], house[2]
    if plain := _PLAIN_ERROR.match(text):
        return "", plain[1]
    if text.lstrip().startswith("{"):
        try:
            value = json.loads(text)
            if isinstance(value, dict) and value.get("error"):
                return "", str(value["error"])
        except (ValueError, RecursionError):
            return None
    return None


def _classify(kind: str, message: str) -> str:
    if kind in _KINDS:
        return _KINDS[kind]
    head = message.strip()[:SEARCHED]
    return next((name for name, pattern in _PATTERNS if pattern.search(head)), "other_tool_error")


def _from_tools(category: str) -> Callable[[Episode, Mapping[str, str]], str | None]:
    return lambda _, errors: errors.get(category)


def _from_outcome(*outcomes: Outcome) -> Callable[[Episode, Mapping[str, str]], str | None]:
    return lambda episode, _: f"{episode.outcome}: {episode.reason}" if episode.outcome in outcomes else None


def _timeout(episode: Episode, errors: Mapping[str, str]) -> str | None:
    return _from_outcome(Outcome.TIMEOUT)(episode, errors) or errors.get("timeout")


def _parse_error(episode: Episode, errors: Mapping[str, str]) -> str | None:
    count = int(episode.metrics.get("parse_errors", 0))
    return f"turns with a call that could not be read: {count}" if count else None


def _loop(episode: Episode, errors: Mapping[str, str]) -> str | None:
    count, text = longest_repetition(episode)
    return f"{count} times: {text[:200]}" if count >= LOOP else None


def _false_completion(episode: Episode, errors: Mapping[str, str]) -> str | None:
    if episode.outcome != Outcome.COMPLETED or episode.solved is not False:
        return None
    return f"answered {episode.final_answer!r}"[:300] if episode.final_answer else "declared the task done"


CATEGORIES: tuple[Category, ...] = (
    Category("arguments", "argument errors", "a tool refused the arguments of a call", _from_tools("arguments")),
    Category(
        "authorisation", "authorisation", "a tool answered that the user lacks permission", _from_tools("authorisation")
    ),
    Category("not_found", "not found", "a tool did not find what the call named", _from_tools("not_found")),
    Category("unknown_tool", "unknown tool", "a call named a tool that does not exist", _from_tools("unknown_tool")),
    Category(
        "server", "server errors", "a tool answered that its service was busy, locked or broken", _from_tools("server")
    ),
    Category("other_tool_error", "other tool errors", "any other error of a tool", _from_tools("other_tool_error")),
    Category("timeout", "timeouts", "the outcome is `timeout`, or a tool timed out", _timeout),
    Category("parse_error", "unreadable calls", "a tool call could not be parsed", _parse_error),
    Category("loop", "repeated call loops", f"one action was taken {LOOP} times or more, thinking aside", _loop),
    Category(
        "false_completion",
        "false completion",
        "the outcome is `completed` and its known reward is below eval.pass_threshold",
        _false_completion,
    ),
    Category(
        "context_overflow",
        "context overflow",
        "the outcome is `context_overflow` or `prompt_too_long`",
        _from_outcome(Outcome.CONTEXT_OVERFLOW, Outcome.PROMPT_TOO_LONG),
    ),
    Category(
        "truncated",
        "turn cut off",
        "the outcome is `generation_truncated`: one turn reached its token limit or its deadline",
        _from_outcome(Outcome.GENERATION_TRUNCATED),
    ),
    Category("max_turns", "turn limit", "the outcome is `max_turns`", _from_outcome(Outcome.MAX_TURNS)),
    Category("no_action", "no action", "the outcome is `no_action`", _from_outcome(Outcome.NO_ACTION)),
    Category("wrote_image", "wrote an image", "the outcome is `wrote_image`", _from_outcome(Outcome.WROTE_IMAGE)),
    Category(
        "environment",
        "environment failure",
        "the outcome is `env_failed`, `refused` or `aborted`; the reward is unknown",
        _from_outcome(Outcome.ENV_FAILED, Outcome.REFUSED, Outcome.ABORTED),
    ),
    Category(
        "verifier",
        "verifier unknown",
        "the outcome is `verifier_failed`; the reward is unknown",
        _from_outcome(Outcome.VERIFIER_FAILED),
    ),
)


def failures(episode: Episode) -> dict[str, str]:
    """Map the key of each category that the episode belongs to → evidence."""
    errors = dict(reversed(tool_errors(episode)))  # the first of a category stays
    return {c.key: text for c in CATEGORIES if (text := c.evidence(episode, errors)) is not None}


def by_category(episodes: Sequence[Episode]) -> dict[str, list[tuple[Episode, str]]]:
    """Map the key of each category → its episodes with their evidence, in order."""
    found: dict[str, list[tuple[Episode, str]]] = {c.key: [] for c in CATEGORIES}
    for episode in episodes:
        for key, text in failures(episode).items():
            found[key].append((episode, text))
    return found

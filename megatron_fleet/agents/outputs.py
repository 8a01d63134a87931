"""Truncation of long tool results, which are kept so that the policy can page through and search them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

MAX_KEPT_CHARS, MAX_EPISODE_CHARS = 1_000_000, 4_000_000
"""Limits per result and per episode: a worker holds hundreds of episodes, and a policy reads only a few pages."""
MAX_MATCHES = 10
SNIPPET_CHARS = 80
"""Context shown on either side of a match."""


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

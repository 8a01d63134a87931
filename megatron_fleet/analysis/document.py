"""The report as blocks, which a page and a Markdown file show each in their own way."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from megatron_fleet.analysis.pairs import Pair


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell of a table.

    Attributes:
        sort: what the page sorts the column by; ``None`` = the text.
        tone: ``good``, ``bad``, ``warn``, ``quiet`` or empty.
        title: more about it, for a tooltip.
        links: ids of trajectories to open.
    """

    text: str
    sort: float | None = None
    tone: str = ""
    title: str = ""
    links: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under a head; columns after the first are right-aligned when ``numbers`` says so."""

    kind: ClassVar[str] = "table"
    head: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    numbers: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Text:
    kind: ClassVar[str] = "text"
    text: str


@dataclass(frozen=True, slots=True)
class Items:
    """A list of sentences."""

    kind: ClassVar[str] = "items"
    items: tuple[str, ...]
    tone: str = ""


@dataclass(frozen=True, slots=True)
class Fact:
    """A figure of the head: what it is, its value, and what is to be said beside it."""

    label: str
    value: str
    detail: str = ""
    tone: str = ""


@dataclass(frozen=True, slots=True)
class Facts:
    kind: ClassVar[str] = "facts"
    facts: tuple[Fact, ...]


@dataclass(frozen=True, slots=True)
class Series:
    """``points``: step and value, in order of step."""

    label: str
    points: tuple[tuple[float, float], ...]
    sparse: bool = False
    """Few points that stand for themselves, such as evaluations: drawn with marks."""


@dataclass(frozen=True, slots=True)
class Chart:
    title: str
    series: tuple[Series, ...]
    share: bool = False
    """Values are shares: the axis shows 0 to 1, so that small gains do not look like large ones."""
    marks: tuple[int, ...] = ()
    """Steps at which the run was resumed."""


@dataclass(frozen=True, slots=True)
class Charts:
    kind: ClassVar[str] = "charts"
    charts: tuple[Chart, ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    kind: ClassVar[str] = "comparison"
    pairs: tuple[Pair, ...]


@dataclass(frozen=True, slots=True)
class Browser:
    """The trajectories of the page."""

    kind: ClassVar[str] = "browser"


Block = Table | Text | Items | Facts | Charts | Comparison | Browser


@dataclass(frozen=True, slots=True)
class Section:
    id: str
    title: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class Document:
    title: str
    subtitle: str
    sections: tuple[Section, ...] = field(default=())

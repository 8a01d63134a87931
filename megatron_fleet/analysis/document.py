"""Report document as a list of blocks, rendered by `html.py` and `markdown.py`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from megatron_fleet.analysis.pairs import Pair


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell of a table.

    Attributes:
        sort: sort key of the column on the page; ``None`` = the text.
        tone: ``good``, ``bad``, ``warn``, ``quiet`` or empty.
        title: tooltip text.
        links: ids of trajectories to open.
    """

    text: str
    sort: float | None = None
    tone: str = ""
    title: str = ""
    links: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under a header; columns whose index is in ``numbers`` are right-aligned."""

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
    """One figure of the head section: label, value and explanatory detail."""

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
    """Few individual points, such as evaluations: drawn with markers."""


@dataclass(frozen=True, slots=True)
class Chart:
    title: str
    series: tuple[Series, ...]
    share: bool = False
    """Values are shares: the axis covers 0 to 1, so that small gains do not look large."""
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

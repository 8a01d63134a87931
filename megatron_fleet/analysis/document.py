"""Report document as a list of blocks, rendered by `render.py`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from megatron_fleet.analysis.selection import Pair
from megatron_fleet.telemetry.charts import Chart


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
class ReportSection:
    id: str
    title: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class Document:
    title: str
    subtitle: str
    sections: tuple[ReportSection, ...] = field(default=())

"""`Episode`: one validated row of a shard of episodes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_fleet.telemetry.rewards import is_solved
from megatron_fleet.telemetry.shards import Shard
from megatron_fleet.telemetry.trajectories import FILE_NAME

LARGEST = 1e100
"""Larger magnitudes are not plausible measurements, and their sums overflow."""


@dataclass(frozen=True, slots=True)
class Episode:
    """One recorded episode.

    Attributes:
        kind, step, line: location: ``trajectories/{kind}_{step}.parquet``, row from 0.
        reward: ``None`` = unknown, which is never counted as 0.
        solved: by the run's ``eval.pass_threshold``; ``None`` = unknown.
        spans: ``(kind, start, end, turn, weight version)`` over the tokens.
        segment_starts: token indices at which a new prompt begins because the history was rewritten.
        messages: ``(role, text)`` of the conversation.
        images: per message, the digests of the images shown with it.
    """

    kind: str
    step: int
    line: int
    task: str
    env: str
    sample: int
    outcome: str
    reward: float | None
    solved: bool | None
    reason: str
    final_answer: str | None
    tokens: int
    action_tokens: int
    metrics: dict[str, float] = field(default_factory=dict)
    spans: tuple[tuple[str, int, int, int, int], ...] = ()
    segment_starts: tuple[int, ...] = ()
    messages: tuple[tuple[str, str], ...] = ()
    images: tuple[tuple[str, ...], ...] = ()

    @property
    def id(self) -> str:
        return f"{self.kind}-{self.step}-{self.line}"

    @property
    def result(self) -> str:
        return {True: "solved", False: "not solved", None: "unknown"}[self.solved]


def read_episodes(path: Path, pass_threshold: float, rows: Sequence[int] | None = None) -> tuple[list[Episode], int]:
    """Return the episodes of one shard, and the number of rows skipped as unusable.

    Args:
        rows: only these, ascending; ``None`` = all.

    Raises:
        UserError: it cannot be read.
    """
    name = FILE_NAME.fullmatch(path.name)
    if name is None:
        raise ValueError(f"{path}: not the name of a trajectory log")
    episodes: list[Episode] = []
    left_out = 0
    shard = Shard.open(path)
    lines = range(shard.rows) if rows is None else rows
    for line, record in zip(lines, shard.records(rows=rows), strict=True):
        try:
            episodes.append(_episode(record, name[1], int(name[2]), line, pass_threshold))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
            left_out += 1
    return episodes, left_out


def message_text(message: Mapping[str, Any]) -> str:
    """Return the text of a message: its joined content parts (``[image]`` for images), and tool calls as JSON."""
    content = message.get("content")
    parts = content if isinstance(content, list) else [content]
    texts = [_part_text(part) for part in parts if part is not None]
    if message.get("tool_calls"):
        texts.append(json.dumps(message["tool_calls"], ensure_ascii=False))
    return "\n".join(texts)


def _part_text(part: Any) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and isinstance(part.get("text"), str):
        return part["text"]
    if isinstance(part, dict) and "image" in str(part.get("type", "")):
        return "[image]"
    return json.dumps(part, ensure_ascii=False, default=str)


def _episode(record: Mapping[str, Any], kind: str, step: int, line: int, pass_threshold: float) -> Episode:
    answer, reward = record.get("final_answer"), number_of(record.get("reward"))
    return Episode(
        kind=kind,
        step=step,
        line=line,
        task=shown(str(record["task"])),
        env=shown(str(record["env"])),
        sample=_count(record.get("sample", 0)),
        outcome=shown(str(record["outcome"])),
        reward=reward,
        solved=None if reward is None else is_solved(reward, pass_threshold),
        reason=str(record.get("reason") or ""),
        final_answer=None if answer is None else str(answer),
        tokens=_count(record.get("tokens", 0)),
        action_tokens=_count(record.get("action_tokens", 0)),
        metrics={k: v for k, value in (record.get("metrics") or {}).items() if (v := number_of(value)) is not None},
        spans=tuple(
            (str(k), _count(a), _count(b), _count(t), _count(v, -1)) for k, a, b, t, v in record.get("spans") or ()
        ),
        segment_starts=tuple(_count(start) for start in record.get("segment_starts") or ()),
        messages=tuple((str(m.get("role", "")), message_text(m)) for m in record.get("messages") or ()),
        images=tuple(tuple(map(str, m.get("images") or ())) for m in record.get("messages") or ()),
    )


def number_of(value: Any) -> float | None:
    """Return ``value`` as a float if it is a finite number of magnitude below ``LARGEST``, else ``None``."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not -LARGEST < value < LARGEST:
        return None
    return float(value)


def shown(text: str) -> str:
    """Return ``text`` with unprintable characters escaped, terminal control characters included."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _count(value: Any, least: int = 0) -> int:
    """Return ``value`` as a count. Raises ValueError, or OverflowError for infinity, if it is not one."""
    if not least <= (count := int(value)) < 1 << 53:
        raise ValueError("no count")
    return count

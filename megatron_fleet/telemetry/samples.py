"""Conversations as text, and the few of a step that trackers show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, zip_longest
from typing import TYPE_CHECKING, Any

from megatron_fleet.telemetry.sinks import json_number

if TYPE_CHECKING:
    from megatron_fleet.agents.trajectory import Group, Trajectory

MAX_PROMPT, MAX_TURNS = 4_000, 12_000
"""Characters of a prompt and of the turns in a tracker's table, whose rows are sent at every step."""
COLUMNS = ("step", "environment", "task", "outcome", "reward", "prompt", "turns", "reason")
ACTING = "assistant"
"""Role of the policy's messages."""


def rendered(messages: Sequence[Mapping[str, Any]]) -> str:
    """Render messages as text: a line with the role, then what was said."""
    return "\n\n".join(f"── {message['role']}\n{message['content']}" for message in messages)


def cut(text: str, limit: int) -> str:
    """Return the text; beyond ``limit`` characters its middle is replaced by a note of how many are missing."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n[… {len(text) - 2 * half} characters …]\n{text[-half:]}"


def parts(messages: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """Return the prompt, which is all before the policy's first message, and the turns, both as text."""
    roles = [message["role"] for message in messages]
    start = roles.index(ACTING) if ACTING in roles else len(roles)
    return rendered(messages[:start]), rendered(messages[start:])


def choose(groups: Sequence[Group], count: int, step: int) -> list[Trajectory]:
    """Choose at most ``count`` episodes, one of a group: round-robin over environments, the best and the worst of their
    groups in turn. Which groups depends on ``step``, so that not only the first ones are ever shown.
    """
    by_env: dict[str, list[Group]] = {}
    for group in groups:
        if group.trajectories:
            by_env.setdefault(group.env_key, []).append(group)
    turned = [own[step % len(own) :] + own[: step % len(own)] for _, own in sorted(by_env.items())]
    if turned:
        turned = turned[step % len(turned) :] + turned[: step % len(turned)]
    mixed = [group for group in chain.from_iterable(zip_longest(*turned)) if group is not None]
    return [_extreme(group, best=index % 2 == 0) for index, group in enumerate(mixed[:count])]


def _extreme(group: Group, best: bool) -> Trajectory:
    known = [t for t in group.trajectories if t.reward is not None]
    return (max if best else min)(known, key=lambda t: t.reward or 0.0) if known else group.trajectories[0]


def row(t: Trajectory, step: int) -> list[Any]:
    """Build the row of an episode in a tracker's table; see ``COLUMNS``."""
    prompt, turns = parts(t.messages)
    texts = cut(prompt, MAX_PROMPT), cut(turns, MAX_TURNS), cut(t.reward_reason, MAX_PROMPT)
    return [step, t.env_key, t.task_key, str(t.outcome), json_number(t.reward), *texts]

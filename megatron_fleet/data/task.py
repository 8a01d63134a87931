"""Task: one row of a Fleet task file, normalised. ``dataset.load_tasks`` reads a whole file."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Task:
    """One task.

    Attributes:
        key: unique id; the split hashes it.
        prompt: the user's request.
        env_key: environment; metrics are grouped by it.
        env_version: version of the environment image, ``None`` for its default.
        data_key, data_version: seed data of the environment, ``None`` for its default.
        env_variables: passed to the environment and shown to the policy (``CURRENT_DATE``, ``LOGGED_IN_USER``…).
        verifier_code: Python source. Only the embedded fleet's verifier host runs it; in addition, Fleet's own SDK
            (``env.kind=fleet``) runs its module level in the episode worker. Empty if the environment scores by itself.
        modality: ``tool_use``, ``computer_use`` or ``browser_use``.
        difficulty: 1 (easy) to 3 (hard), ``None`` if not given.
        answer: what the reward compares with, a JSON value. Private: never shown to the policy, sent to no environment
            server and left out of ``repr``; a class or a reward function of the user's own reads it.
    """

    key: str
    prompt: str
    env_key: str
    verifier_code: str = ""
    env_version: str | None = None
    data_key: str | None = None
    data_version: str | None = None
    env_variables: dict[str, Any] = field(default_factory=dict)
    modality: str = "tool_use"
    difficulty: int | None = None
    answer: Any = field(default=None, repr=False)

"""What the policy is told before its first turn.

The system text depends on the environment only. With the tool definitions that follow it, it is one token prefix for
all tasks of an environment, which engines keep in their prefix cache; what belongs to one task comes last.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from megatron_fleet.data.task import Task

SYSTEM = (
    "Complete the user's task with the tools. In each turn do one thing: call one tool, or finish. "
    "To finish, write the final answer followed by <done>. "
    "If a tool returns an error, read it and change the call."
)
REMINDER = "Call one tool, or finish: write the final answer followed by <done>."

# Added to SYSTEM for one environment: what cannot be learnt from its tool definitions.
ENVIRONMENT_HINTS: Mapping[str, str] = MappingProxyType(
    {"fostgres": "Before querying, list the tables and columns through information_schema."}
)
_LABELS: Mapping[str, str] = MappingProxyType(
    {"CURRENT_DATE": "Current date", "LOGGED_IN_USER": "Logged-in user", "LOGGED_IN_NAME": "Logged-in name"}
)


def system_prompt(env_key: str) -> str:
    """The system text of an environment."""
    hint = ENVIRONMENT_HINTS.get(env_key)
    return f"{SYSTEM} {hint}" if hint else SYSTEM


def user_prompt(task: Task, prompt: str) -> str:
    """The task as the user says it, followed by its environment variables (the date too: never the host's clock)."""
    lines = [f"{_LABELS.get(key, key)}: {value}" for key, value in sorted(task.env_variables.items())]
    return "\n".join([prompt, "", *lines]) if lines else prompt

"""Prompt texts shown to the policy, from ``prompts.yaml`` or overridden by the user's own file."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from megatron_fleet.config.errors import UserError
from megatron_fleet.config.files import parse_yaml, read_file
from megatron_fleet.config.sections.base import Section
from megatron_fleet.data.task import Task

SHIPPED = Path(__file__).with_name("prompts.yaml")
Finish = Literal["done_tag", "tool"]
Turns = Literal["one_turn", "several_turns"]


class Prompts(Section):
    """Registry of prompt texts; ``prompts.yaml`` documents the purpose of each."""

    system: str
    system_without_tools: dict[Turns, str]
    finish: dict[Finish, str]
    environments: dict[str, str]
    labels: dict[str, str]
    reminder: str
    reminder_without_tools: str
    repeated: str
    removed: str
    unseen: str

    def system_text(self, env_key: str, finish: Finish, tools: bool = True, several_turns: bool = True) -> str:
        """Return the system text of an environment; the same for all its tasks.

        Args:
            tools: whether the policy has any.
            several_turns: whether it may take more than one.
        """
        without = self.system_without_tools["several_turns" if several_turns else "one_turn"]
        text, hint = self._said(self.system if tools else without, finish), self.environments.get(env_key)
        return f"{text} {hint}" if hint else text

    def user_text(self, task: Task, prompt: str) -> str:
        """Return the user message: the prompt, then the task's variables (also the date, never the host's clock)."""
        lines = [f"{self.labels.get(key, key)}: {value}" for key, value in sorted(task.env_variables.items())]
        return "\n".join([prompt, "", *lines]) if lines else prompt

    def reminder_text(self, finish: Finish, tools: bool = True) -> str:
        """Return the reminder for a turn with neither a tool call nor an answer."""
        return self._said(self.reminder if tools else self.reminder_without_tools, finish)

    def _said(self, text: str, finish: Finish) -> str:
        return text.replace("{finish}", self.finish[finish])


def load_prompts(path: str | Path | None) -> Prompts:
    """Load the shipped texts, overridden by those of ``path``.

    Raises:
        UserError: the file is missing or not YAML, or has an unknown key or an invalid value.
    """
    if path is None:
        return _shipped()
    texts = _shipped().model_dump()
    for key, value in _read(Path(path)).items():
        if key not in texts:
            raise UserError(f"agent.prompts={path}: unknown key {key!r}; use {', '.join(texts)}.")
        both = isinstance(texts[key], dict) and isinstance(value, dict)
        texts[key] = texts[key] | value if both else value
    try:
        return Prompts.model_validate(texts)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise UserError(f"agent.prompts={path}: {where}: {first['msg']}; {SHIPPED.name} shows the form.") from None


def _shipped() -> Prompts:
    return Prompts.model_validate(_read(SHIPPED))


def _read(path: Path) -> dict[str, Any]:
    remedy = f"correct agent.prompts; {SHIPPED.name} shows the form"
    content = parse_yaml(read_file(path, remedy), str(path), remedy)
    if not isinstance(content, dict):
        raise UserError(f"agent.prompts={path} must be a table of texts; {SHIPPED.name} shows the form.")
    return content

"""The user's own texts for prompts, and lists of excluded tasks: YAML."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fuzz import folders
from fuzz.engine import Surface
from fuzz.outcomes import refusal_of

from megatron_fleet.agents.prompts import SHIPPED, load_prompts
from megatron_fleet.data.selection import read_exclusion
from megatron_fleet.data.task import Task

TASK = Task("t", "find it", "shop", env_variables={"CURRENT_DATE": "2025-01-01"})
TEXTS = {"system": "You act. {finish}", "finish": {"tool": "Call it."}, "labels": {"CURRENT_DATE": "Date"}}
LIST = {"reason": "broken", "environments": ["shop"], "tasks": ["a", "b"]}


def seeds() -> list[Any]:
    shipped = SHIPPED.read_bytes()
    return [
        *({"prompts.yaml": content} for content in (TEXTS, shipped, b"system: |\n  a\n  {finish}\n")),
        *({"list.yaml": content} for content in (LIST, b"reason: x\nenvironments: [a]\ntasks:\n- b\n")),
    ]


def check(tree: Any, folder: Path) -> bool:
    folders.write(folder, tree)
    if isinstance(tree, dict) and "list.yaml" in tree:
        with refusal_of(folder):
            read_exclusion(str(folder / "list.yaml")).covers(TASK)
            return True
        return False
    with refusal_of(folder):
        prompts = load_prompts(folder / "prompts.yaml")
        for finish in ("done_tag", "tool"):
            texts = (prompts.system_text("shop", finish), prompts.reminder_text(finish), prompts.user_text(TASK, "p"))
            assert all(isinstance(text, str) for text in texts)
        return True
    return False


YAML = ("!!int ''", "!!timestamp x", "2001-99-99", "&a [*a]", "? [a]", "!!python/object:os.system", "{finish}", "<<: 1")
SURFACE = Surface(
    "prompts", 200, seeds, check, words=(*YAML, "!!bool x", "!!float ''", "'\\ud800'", '"\\ud800"', "- -")
)

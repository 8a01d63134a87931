"""Write ``docs/reference/commands.md`` from the parser of ``mfleet``. Usage: python tools/commands_page.py"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from megatron_fleet import cli

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "commands.md"
HEAD = """# Commands

Generated from the parser of `mfleet` by `python tools/commands_page.py`; do not edit. `mfleet COMMAND --help` shows the
same. Overrides are explained in the [quickstart](../learn/quickstart.md#change-something).

Exit status: 0 for success; 2 for an error that the user can correct, described in one line; 130 after Ctrl-C; 1 for any
other failure, with a line that says where the traceback is.
"""


def page() -> str:
    """Return the page as Markdown: a section for each command, in the order of the parser."""
    return HEAD + "".join(section(name, about, parser) for name, about, parser in commands("mfleet", "", cli._parser()))


def commands(
    name: str, about: str, parser: argparse.ArgumentParser
) -> Iterator[tuple[str, str, argparse.ArgumentParser]]:
    """Yield name, purpose and parser of every command below ``parser`` that has no subcommands."""
    below = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    for action in below:
        purposes = {choice.dest: choice.help or "" for choice in action._choices_actions}
        for word, child in action.choices.items():
            yield from commands(f"{name} {word}", purposes[word], child)
    if not below:
        yield name, about, parser


def section(name: str, about: str, parser: argparse.ArgumentParser) -> str:
    """Return the section of one command: purpose, synopsis, table of arguments."""
    actions = [action for action in parser._actions if not isinstance(action, argparse._HelpAction)]
    lines = ["", f"## {name}", "", f"{about[0].upper()}{about[1:]}."]
    lines += ["", "```", " ".join([name, *(synopsis(action) for action in actions)]), "```"]
    if actions:
        lines += ["", "| argument | meaning |", "|---|---|"]
        lines += [f"| `{spelt(action)}` | {meaning(action)} |" for action in actions]
    return "\n".join(lines) + "\n"


def spelt(action: argparse.Action) -> str:
    """Return an argument as it is typed, with a name for its value."""
    value = action.metavar or (f"{{{','.join(action.choices)}}}" if action.choices else action.dest.upper())
    if not action.option_strings:
        return str(action.metavar or action.dest)
    return action.option_strings[0] if action.nargs == 0 else f"{action.option_strings[0]} {value}"


def synopsis(action: argparse.Action) -> str:
    """Return an argument's part of the synopsis: in brackets unless it is required."""
    if action.nargs == "*":
        return f"[{spelt(action)} …]"
    return spelt(action) if action.required else f"[{spelt(action)}]"


def meaning(action: argparse.Action) -> str:
    """Return the help text with its default filled in, safe in a table."""
    return (action.help or "").replace("%(default)s", str(action.default)).replace("|", r"\|")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

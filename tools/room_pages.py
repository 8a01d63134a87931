"""Write ``docs/rooms/``: a page for each folder of the package, with its modules and what they import, from the code.

Usage: python tools/room_pages.py
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "megatron_fleet"
PAGES = ROOT / "docs" / "rooms"
MODULES = {
    path.relative_to(PACKAGE).with_suffix("").as_posix().removesuffix("/__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
    if path.parent != PACKAGE
}
"""``room/module`` (a package: ``room``) → its file."""
ROOMS = sorted({name.split("/")[0] for name in MODULES})
LARGE_ROOM = 20
"""Modules that a picture can show one by one."""
HEAD = "Generated from the code by `python tools/room_pages.py`; do not edit.\n"


def docstring(path: Path) -> str:
    return ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""


def first_paragraph(text: str) -> str:
    return " ".join(text.split("\n\n")[0].split()).replace("``", "`").replace("|", "\\|")


def imports(name: str) -> Iterator[str]:
    """Modules of the package's rooms that module ``name`` imports, anywhere in its text."""
    for node in ast.walk(ast.parse(MODULES[name].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            wanted = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            wanted = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for target in wanted:
            parts = target.split(".")[1:] if target.startswith("megatron_fleet.") else []
            while parts and "/".join(parts) not in MODULES:
                parts.pop()
            if parts and "/".join(parts) != name:
                yield "/".join(parts)


def room_of(name: str) -> str:
    return name.split("/")[0]


def picture(room: str) -> str:
    """The room's modules and their imports; other rooms as rounded boxes (``config`` serves all and is left out).

    The modules of a folder inside a large room are drawn as one box.
    """
    names = [name for name in MODULES if room_of(name) == room]

    def box(name: str) -> str:
        parts = name.split("/")
        return "/".join(parts[:2]) if len(parts) > 2 and len(names) > LARGE_ROOM else name

    inside = {box(name) for name in names}
    arrows = set()
    for name in names:
        for target in imports(name):
            if room_of(target) == room:
                arrows.add((box(name), box(target)))
            elif room_of(target) != "config":
                arrows.add((box(name), room_of(target)))
    arrows = {(a, b) for a, b in arrows if a != b}
    shown = {end for arrow in arrows for end in arrow} | {name for name in inside if "/" in name}
    nodes = [f'  {_id(n)}["{n.removeprefix(room + "/")}"]' for n in sorted(shown & inside)]
    nodes += [f'  {_id(n)}(["{n}"])' for n in sorted(shown - inside)]
    return _mermaid(nodes, arrows)


def plan() -> str:
    """All rooms and which imports which (``config`` and ``platform`` may be imported by all and are left out)."""
    arrows = {(room_of(name), room_of(target)) for name in MODULES for target in imports(name)}
    arrows = {(a, b) for a, b in arrows if a != b and b not in ("config", "platform")}
    return _mermaid([f'  {_id(room)}["{room}"]' for room in ROOMS], arrows)


def page(room: str) -> str:
    text = docstring(MODULES[room]).replace("``", "`")
    title, _, rest = text.partition("\n\n")
    lines = [f"# {room}", "", HEAD, " ".join(title.split()), "", rest, ""]
    lines += [picture(room), "An arrow means *imports*.", ""]
    lines += ["| module | what it is for |", "|---|---|"]
    for name, path in MODULES.items():
        if room_of(name) == room and name != room and (text := docstring(path)):
            file = path.relative_to(PACKAGE / room).as_posix()
            lines.append(f"| [{file}](../../megatron_fleet/{room}/{file}) | {first_paragraph(text)} |")
    return "\n".join(lines) + "\n"


def index() -> str:
    lines = ["# The rooms", "", HEAD, plan(), "An arrow means *imports*; a test refuses every other one.", ""]
    lines += ["| room | concern |", "|---|---|"]
    lines += [f"| [{room}]({room}.md) | {first_paragraph(docstring(MODULES[room]))} |" for room in ROOMS]
    return "\n".join(lines) + "\n"


def pages() -> dict[str, str]:
    """File name → text of every page."""
    return {"README.md": index()} | {f"{room}.md": page(room) for room in ROOMS}


def _id(name: str) -> str:
    return "m_" + name.replace("/", "_")


def _mermaid(nodes: list[str], arrows: set[tuple[str, str]]) -> str:
    drawn = [f"  {_id(a)} --> {_id(b)}" for a, b in sorted(arrows)]
    return "\n".join(["```mermaid", "flowchart LR", *nodes, *drawn, "```", ""])


if __name__ == "__main__":
    PAGES.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (PAGES / name).write_text(text, encoding="utf-8")
    print(PAGES)

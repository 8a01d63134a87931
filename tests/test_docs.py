"""The pages that are made from the code say what the code says."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_room_pages_are_current():
    spec = importlib.util.spec_from_file_location("room_pages", ROOT / "tools" / "room_pages.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    written = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "rooms").glob("*.md")}
    assert written == module.pages(), "run: python tools/room_pages.py"
    for room in module.ROOMS:
        assert module.docstring(module.MODULES[room]), f"{room}/__init__.py says nothing"

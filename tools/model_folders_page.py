"""Fill in the table of model folders in ``docs/run/convert.md``. Usage: python tools/model_folders_page.py

The folders are those of the tests (``tests/model_folders.py``): each is made, checked as a dry run does, and converted
with ``--plan``.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path += [str(ROOT / "tests"), str(ROOT / "tests" / "weights")]

import model_folders  # noqa: E402

from megatron_fleet.config.errors import UserError  # noqa: E402
from megatron_fleet.config.load import load  # noqa: E402
from megatron_fleet.weights.model_check import check_model  # noqa: E402

PAGE = ROOT / "docs" / "run" / "convert.md"
PLACE = re.compile(r"<!-- table: folders -->\n.*?<!-- end -->", re.DOTALL)


def rows() -> Iterator[tuple[str, str, str]]:
    """Each folder, what the check says, and whether that is said of runs alone."""
    for name, case in model_folders.CASES.items():
        with tempfile.TemporaryDirectory() as place:
            folder = model_folders.write(Path(place) / "model", **(case.made or {}))
            case.damage(folder)
            try:
                config = load(["experiment=quickstart", f"model.path={folder}", f"run.out={place}/out"])
                check_model(config.model, config.rollout.engine.speculative)
                said = "accepted"
            except UserError as error:
                said = str(error).replace(f"{place}/model", "model").replace("|", "\\|")
        yield name, said, "runs" if case.weights_alone else "runs and conversions"


def table() -> str:
    """Accepted folders in a line, and a row for each that is refused."""
    found = list(rows())
    accepted = [name for name, said, _ in found if said == "accepted"]
    lines = [f"Accepted: {', '.join(accepted)}.", "", "| folder | error message | refused for |", "|---|---|---|"]
    lines += [f"| {name} | `` {said} `` | {where} |" for name, said, where in found if said != "accepted"]
    return "\n".join(lines)


def page(text: str) -> str:
    """Return the page with its table made anew."""
    return PLACE.sub(lambda _: f"<!-- table: folders -->\n\n{table()}\n\n<!-- end -->", text)


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()

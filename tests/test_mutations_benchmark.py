"""The mutation benchmark on a package of one function, half of which is tested."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

MUTATIONS = Path(__file__).parents[1] / "benchmarks" / "mutations.py"
SOURCE = """def sign(x: int = 0) -> int:
    if x < 0:
        return -1
    return (
        x
        > 0
    )


def unused() -> int:
    return 4
"""
TEST = """from megatron_fleet.signs import sign

def test_that_fails_anyway():
    assert sign(-1) == 1

def test_negative():
    assert sign(-1) == -1
    assert [sign(0), sign(1)] == [False, True]
"""


@pytest.mark.slow
@pytest.mark.in_turn(number=0, of=4)
def test_what_no_test_covers_survives_and_the_checkout_stays_as_it_was(tmp_path):
    checkout, out = tmp_path / "clone", tmp_path / "mutations.json"
    for name, text in {
        "megatron_fleet/__init__.py": "",
        "megatron_fleet/signs.py": SOURCE,
        "tests/test_signs.py": TEST,
        "pytest.ini": "[pytest]\nmarkers = slow\n",
        ".venv/engine/bin/python": f'#!/bin/sh\nexec {sys.executable} -B "$@"\n',
    }.items():
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        (checkout / name).write_text(text)
    (checkout / ".venv/engine/bin/python").chmod(0o755)
    git = ["git", "-C", str(checkout), "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "-f", "."], ["commit", "-qm", "all"]):
        subprocess.run([*git, *command], check=True)
    command = [sys.executable, str(MUTATIONS), str(checkout), "--out", str(out)]
    last = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    verdicts = json.loads(out.read_text())["verdicts"]
    killed = {(v["mutation"]["line"], v["mutation"]["after"]) for v in verdicts if v["killed_by"]}
    assert killed == {(2, "if x <= 0:"), (2, "if x < 1:"), (3, "return -2"), (3, "return None"), (6, "> 1")}
    assert {v["killed_by"] for v in verdicts} == {"tests/test_signs.py::test_negative", None}
    assert len(verdicts) == 6  # the last one in a function that no test calls
    assert json.loads(last)["killed"] == 5
    assert (checkout / "megatron_fleet/signs.py").read_text() == SOURCE
    # Nothing is left to do, so nothing is run a second time.
    assert subprocess.run(command, capture_output=True, text=True, check=True).stderr == ""

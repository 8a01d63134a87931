"""Tests marked nightly have their turn in CI."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from nightly import MOST_MINUTES, TURN_MINUTES, turn

ROOT = Path(__file__).parents[1]
MINUTES = {"short": 1.0, "half": 2.5, "other": 2.5, "long": 8.0, "hours": 90.0}


def test_every_test_has_its_turn_and_a_turn_its_time():
    counts: Counter[str] = Counter()
    for number in range(400):
        chosen = turn(MINUTES, f"commit {number}")
        assert chosen == turn(MINUTES, f"commit {number}")
        assert sum(MINUTES[name] for name in chosen) <= TURN_MINUTES or len(chosen) == 1
        counts.update(chosen)
    assert set(counts) == set(MINUTES) - {"hours"}
    assert min(counts.values()) > 60, "a quarter of the runs at least, as many as there are tests"


def test_a_long_test_is_played_alone():
    turns = [turn({"long": 8.0, "other long": MOST_MINUTES}, str(number)) for number in range(20)]
    assert all(len(chosen) == 1 for chosen in turns) and {"long", "other long"} == set().union(*turns)


def test_every_mark_says_how_long_it_takes():
    marks = [
        (path.relative_to(ROOT), argument)
        for path in ROOT.glob("tests/**/test_*.py")
        for argument in re.findall(r"mark\.nightly\b(\([^)]*\))?", path.read_text(encoding="utf-8"))
    ]
    assert len(marks) > 10
    assert [path for path, argument in marks if not re.fullmatch(r"\(minutes=[\d.]+\)", argument)] == []


@pytest.mark.slow
def test_the_turn_is_that_of_the_command(tmp_path):
    """Without a key no nightly test is collected, with one some of them, with ``--nightly`` all."""
    (tmp_path / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text(encoding="utf-8"))
    (tmp_path / "nightly.py").write_text((ROOT / "tests" / "nightly.py").read_text(encoding="utf-8"))
    (tmp_path / "pytest.ini").write_text("[pytest]\npythonpath = .\nmarkers =\n    nightly: long\n")
    marks = "".join(f"@pytest.mark.nightly(minutes=3)\ndef test_{n}(): pass\n" for n in range(4))
    (tmp_path / "test_some.py").write_text(f"import pytest\ndef test_always(): pass\n{marks}")

    def collected(*options: str) -> int:
        command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *options]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
        return done.stdout.count("::test_")

    assert (collected(), collected("--turn=a"), collected("--nightly")) == (1, 2, 5)

"""Tests marked nightly or in_turn have their turn in CI."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from turns import MOST_MINUTES, TURN_MINUTES, in_turn, turn

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


TESTS = """
import pytest
from turns import in_turn

NAMES = "abcdefgh"

def test_always(): pass

@pytest.mark.in_turn(number=1, of=4)
def test_one_in_four(): pass

@pytest.fixture(scope="module")
def made(played):
    return {"name": played("name"), "of both": played("name", "other")}

@pytest.mark.parametrize("name", in_turn(NAMES, always=("c",)))
def test_variants(name, made):
    print(sorted(made["name"]))
    assert name in made["name"]

@pytest.mark.parametrize(("name", "other"), in_turn([(name, name.upper()) for name in NAMES], always=[("c", "C")]))
def test_more_of_them(name, other, made):
    assert (name, other) in made["of both"] and {one for one, _ in made["of both"]} == {*made["name"]}
"""
NIGHTLY = 4


@pytest.fixture
def play(tmp_path):
    """Runs pytest with options on a file of tests; names of those that passed."""
    for name in ("conftest.py", "turns.py"):
        (tmp_path / name).write_text((ROOT / "tests" / name).read_text(encoding="utf-8"))
    marks = "\n    ".join(("nightly: long", "in_turn: many"))
    (tmp_path / "pytest.ini").write_text(f"[pytest]\npythonpath = .\nmarkers =\n    {marks}\n")
    nightly = "".join(f"@pytest.mark.nightly(minutes=2)\ndef test_nightly_{n}(): pass\n" for n in range(NIGHTLY))
    (tmp_path / "test_some.py").write_text(TESTS + nightly)

    def passed(*options: str) -> list[str]:
        command = [sys.executable, "-m", "pytest", "-q", "-rp", "-p", "no:cacheprovider", *options]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
        return re.findall(r"^PASSED test_some.py::(\S+)", done.stdout, re.MULTILINE)

    return passed


@pytest.mark.slow
def test_the_turn_is_that_of_the_command(play):
    """Without a key: no nightly test and all variants. With one: its turn of both. With ``--nightly`` everything."""
    everything = set(play("--nightly"))
    assert len(everything) == 1 + 1 + 2 * 8 + NIGHTLY and everything == set(play("--nightly", "--turn=a"))
    assert set(play()) == {name for name in everything if "nightly" not in name}
    turns = [set(play(f"--turn={key}")) for key in range(4)]
    assert all(sum("nightly" in name for name in found) == 1 for found in turns)
    for found in turns:
        assert {"test_always", "test_variants[c]", "test_more_of_them[c-C]"} <= found
        # Seven variants have four numbers: two of most of them.
        names = {name[-2] for name in found if name.startswith("test_variants")}
        assert 2 <= len(names) <= 3 and names == {name[-4].lower() for name in found if "more_of_them" in name}
    assert {name for found in turns for name in found if "nightly" not in name} == set(play())
    assert sum("test_one_in_four" in found for found in turns) == 1
    variants = [{name for name in found if "nightly" not in name} for found in turns]
    assert {name for name in play("--turn=a commit") if "nightly" not in name} in variants


def test_each_variant_has_the_same_share_of_the_turns():
    variants = in_turn("abcdefgh", always="c")
    marks = {one.values[0]: one.marks[0].kwargs for one in variants if one != "c"}
    assert len(marks) == 7 and {mark["of"] for mark in marks.values()} == {4}
    assert Counter(mark["number"] % 4 for mark in marks.values()) == {0: 2, 1: 2, 2: 2, 3: 1}


def test_every_mark_of_a_turn_is_right():
    """Those that are written by hand; others are `in_turn`'s."""
    marks = [
        (path.relative_to(ROOT), argument)
        for path in ROOT.glob("tests/**/test_*.py")
        for argument in re.findall(r"mark\.in_turn\b(\([^)]*\))?", path.read_text(encoding="utf-8"))
    ]
    assert [path for path, argument in marks if not re.fullmatch(r"\(number=\d, of=\d\)", argument)] == []

"""The page of measurements is made from the results, and marks those whose measured code has changed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
sys.path += [str(Path(__file__).parents[2] / folder) for folder in ("benchmarks", "tools")]
import measured
import performance_page
from performance_page import MARK, Result


def test_the_page_is_made_from_the_results():
    assert performance_page.page() == performance_page.PAGE.read_text("utf-8"), "run: python tools/performance_page.py"


def test_every_result_on_the_page_names_a_commit():
    for name in performance_page.SHOWN:
        assert Result(name).commit


@pytest.mark.parametrize("name", measured.MEASURES)
def test_measured_files_exist(name):
    assert measured.files(name) and all(file.is_file() for file in measured.files(name))


def test_the_digest_changes_with_any_measured_file_and_with_nothing_else(tmp_path, monkeypatch):
    monkeypatch.setitem(measured.MEASURES, "one", ("a.py", "folder"))
    for name in ("a.py", "other.py", "folder/b.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    before = measured.digest("one", tmp_path)
    (tmp_path / "other.py").write_text("changed")
    assert measured.digest("one", tmp_path) == before
    (tmp_path / "folder" / "b.py").write_text("changed")
    changed = measured.digest("one", tmp_path)
    (tmp_path / "folder" / "b.py").rename(tmp_path / "folder" / "c.py")
    assert len({before, changed, measured.digest("one", tmp_path)}) == 3


@pytest.mark.parametrize(("sources", "mark"), [("of now", ""), ("of an older commit", MARK), (None, MARK)])
def test_a_result_older_than_its_code_is_marked(tmp_path, sources, mark):
    now = measured.digest("offload")
    found = {"ratio": 2.0, "commit": "abc", "sources": now if sources == "of now" else sources}
    (tmp_path / "offload.cpu.json").write_text(json.dumps(found))
    result = Result("offload", tmp_path)
    assert f"{result['ratio']:.1f}{result.mark}" == f"2.0{mark}"
    (tmp_path / "offload.cpu.json").write_text(json.dumps([found | {"sources": now}, found]))
    assert Result("offload", tmp_path).mark == mark


def test_a_result_says_where_it_was_measured_without_git(tmp_path, monkeypatch):
    monkeypatch.setattr(measured, "ROOT", tmp_path)
    stamp = measured.stamp("benchmarks/offload.py")
    assert stamp["commit"] is None and stamp["sources"] == measured.digest("offload")

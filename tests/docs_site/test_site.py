"""The documentation builds strictly and loads nothing from elsewhere; what is generated is current; links lead on."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

pytest.importorskip("mkdocs")

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")


@pytest.mark.slow
def test_every_page_is_built_and_in_the_navigation(site):
    built = {path.relative_to(site).with_suffix(".md").as_posix() for path in site.rglob("*.html")} - {"404.md"}
    assert built == {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    home = (site / "index.html").read_text(encoding="utf-8")
    for section in ("Learn", "Run", "Understand", "Reference"):
        assert re.search(rf'class="md-tabs__link">\s*{section}\s*<', home)


def test_nothing_is_loaded_from_another_host(site):
    """Links that a reader may follow are not loaded."""
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        loaded = re.findall(r'<(?:script|img|iframe|source|video)[^>]*\bsrc="([^"]+)"', text)
        loaded += [
            re.search(r'href="([^"]+)"', link)[1]
            for link in re.findall(r"<link [^>]*>", text)
            if 'rel="canonical"' not in link
        ]
        assert loaded
        assert [url for url in loaded if url.startswith(("http:", "https:", "//"))] == [], page
    for sheet in site.rglob("*.css"):
        assert re.findall(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//", sheet.read_text(encoding="utf-8")) == [], sheet


def test_code_of_the_tutorials_is_that_of_the_examples(site):
    text = (site / "learn" / "your-loss.html").read_text(encoding="utf-8")
    assert "asymmetric_clip" in text and "--8<--" not in text
    for page in ("understand/security.html", "understand/contributing.html"):
        assert "--8<--" not in (site / page).read_text(encoding="utf-8")


def test_commands_are_those_of_the_parser():
    commands_page = importlib.import_module("commands_page")
    assert commands_page.PAGE.read_text(encoding="utf-8") == commands_page.page(), "run: python tools/commands_page.py"


def test_diagrams_are_as_drawn():
    diagrams = importlib.import_module("diagrams")
    drawn = {DOCS / f"{name}.svg": diagrams.draw(diagram) for name, diagram in diagrams.DIAGRAMS.items()}
    measured = ("learn/quickstart.svg", "run/hosted.svg", "run/modes.svg", "understand/mixture.svg")
    charts = {DOCS / name for name in measured}
    charts.update((DOCS / "understand").glob("gpu-*.svg"))
    # Of computed memory and time, see tests/cluster.
    charts |= {DOCS / "understand" / "memory.svg", DOCS / "run" / "planning.svg"}
    assert {path: path.read_text(encoding="utf-8") for path in {*DOCS.rglob("*.svg")} - charts} == drawn, (
        "run: python tools/diagrams.py"
    )


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "SECURITY.md", "examples/README.md"])
def test_links_of_pages_outside_the_site_lead_to_files(page):
    path = ROOT / page
    text = path.read_text(encoding="utf-8")
    links = re.findall(r'\]\(([^)#]+)[^)]*\)|src="([^"]+)"', text)
    local = [a or b for a, b in links if not (a or b).startswith("http")]
    assert [link for link in local if not (path.parent / link).exists()] == []


def test_messages_name_pages_that_exist():
    """`docs/…` in code, configuration and scripts."""
    named = {
        (path.relative_to(ROOT).as_posix(), name)
        for top in ("megatron_fleet", "configs", "requirements", "launch", "benchmarks", "tools", "examples")
        for path in (ROOT / top).rglob("*")
        if path.suffix in {".py", ".yaml", ".txt", ".sh", ".sbatch", ".md"}
        for name in re.findall(r"\bdocs/[\w/.-]+\.(?:md|png|svg)", path.read_text(encoding="utf-8"))
    }
    assert named
    assert [(path, name) for path, name in named if not (ROOT / name).is_file()] == []

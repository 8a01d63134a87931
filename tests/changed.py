"""Prints the test files that the changes since a commit can affect, one per line; ``./test --changed`` runs them.

Usage: python tests/changed.py [COMMIT]        by default where this branch left origin/main, or the last commit

A test is affected when it imports a changed module, directly or through others, when it names one in a text (a program
that it starts), or when it names a changed file of tools/ or one that is not Python, or its folder. What every test
depends on affects all of them.
"""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from import_graph import MODULES, ROOT, import_statements, imported

ALL = ("pyproject.toml", "setup.sh", "test", "tests/conftest.py", "requirements/")
"""Files that every test depends on."""
BATTERY = ROOT / "benchmarks" / "gpu"
"""Its modules are imported from this folder."""
ALWAYS = {"tests/test_repository.py", "tests/upstream/test_upstream.py"}
"""Tests that read every module."""
SITE, SITE_TESTS = ("docs/", "mkdocs.yml", "CONTRIBUTING.md", "SECURITY.md"), "tests/docs_site/conftest.py"
"""Sources of the documentation besides the examples, and the file that all its tests depend on."""
FOUND_BY_FOLDER = {"megatron_fleet.models.registry": ("weights", "chat", "vision", "codec")}
"""Modules that import others by what is in a folder: names of those."""


def git(*arguments: str) -> list[str]:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def changed_files(commit: str | None) -> list[str]:
    """Paths from the root, those of files that are not yet committed among them."""
    if commit is None:
        try:
            (commit,) = git("merge-base", "HEAD", "origin/main")
        except subprocess.CalledProcessError:
            commit = "HEAD"
    return sorted({*git("diff", "--name-only", commit), *git("ls-files", "--others", "--exclude-standard")})


@functools.cache
def dependents() -> dict[Path, set[Path]]:
    """File → the files that import or name it."""
    helpers = {path.stem: path for path in sorted((ROOT / "tests").rglob("*.py"))}
    benchmarks = {path.stem: path for path in sorted((ROOT / "benchmarks").glob("*.py"))}
    battery = {
        ".".join(path.relative_to(BATTERY).with_suffix("").parts).removesuffix(".__init__"): path
        for path in sorted(BATTERY.rglob("*.py"))
    }
    examples = {path.stem: path for path in sorted((ROOT / "examples").glob("*.py"))}
    known = benchmarks | battery | examples | helpers | MODULES
    found = defaultdict[Path, set[Path]](set)
    for path in set(known.values()):
        text = path.read_text(encoding="utf-8")
        names = {name for node in import_statements(ast.parse(text)) for name in imported(node, known)}
        names.update(re.findall(r"(?:megatron_fleet|battery)(?:\.\w+)+", text))
        names.update(name for name in ("megatron_fleet.cli",) if "mfleet" in text and path in helpers.values())
        for name in names:
            while name and name not in known:
                name = name.rpartition(".")[0]
            if name:
                found[known[name]].add(path)
    for module, parts in FOUND_BY_FOLDER.items():
        for path in MODULES[module].parent.rglob("*.py"):
            if path.stem in parts:
                found[path].add(MODULES[module])
    for path in examples.values():
        found[path].add(ROOT / SITE_TESTS)
    for path in (ROOT / "tests").rglob("conftest.py"):
        found[path].update(path.parent.rglob("test_*.py"))
    return found


@functools.cache
def texts() -> dict[Path, str]:
    """The text of every file that another imports or names, and of those others."""
    graph = dependents()
    files = {*graph}.union(*graph.values())
    return {path: path.read_text(encoding="utf-8") for path in files}


def affected(changed: Iterable[str]) -> list[str]:
    """Test files, as paths from the root; folders of all tests when something changed that each depends on."""
    changed = list(changed)
    if any(name == rule or (rule.endswith("/") and name.startswith(rule)) for name in changed for rule in ALL):
        return ["tests"]
    graph = dependents()
    pending = [ROOT / name for name in changed if name.endswith(".py")]
    for other in (Path(name) for name in changed if not name.endswith(".py") or name.startswith("tools/")):
        folder = f'"{other.parent.name}"'
        named = [path for path, text in texts().items() if other.name in text]
        if other.as_posix().startswith(SITE):
            named.append(ROOT / SITE_TESTS)
        pending += named or [path for path, text in texts().items() if folder in text]
    reached = set(pending)
    while pending:
        for path in graph.get(pending.pop(), set()) - reached:
            reached.add(path)
            pending.append(path)
    tests = {str(path.relative_to(ROOT)) for path in reached if path.name.startswith("test_") and path.exists()}
    return sorted(tests | ALWAYS) if changed else []


if __name__ == "__main__":
    print("\n".join(affected(changed_files(*(sys.argv[1:] or [None])))))

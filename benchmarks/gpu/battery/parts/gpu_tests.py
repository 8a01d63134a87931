"""All tests marked ``gpu``, by pytest."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

from battery.results import ROOT, Report, Request, Unavailable

MARK = "pytest.mark.gpu"
MESSAGE = 300


def measure(report: Report, request: Request) -> None:
    """Run the files that have such a test; the others need packages that may not be here."""
    files = marked_files()
    if not files:
        raise Unavailable("no file of tests/ has a test marked gpu")
    junit = Path(request.scratch) / "junit.xml"
    report.doing(f"tests of {len(files)} files")
    options = ["-m", "gpu", "-p", "no:cacheprovider", "--continue-on-collection-errors", f"--junitxml={junit}"]
    command = [sys.executable, "-m", "pytest", *options, *files]
    status = subprocess.run(command, cwd=ROOT, env=dict(os.environ), check=False).returncode
    if not junit.exists():
        raise RuntimeError(f"pytest ended with status {status} and wrote no report; its output is in the log")
    outcomes = read_junit(junit)
    counts = {name: sum(outcome == name for _, outcome, _ in outcomes) for name in ("passed", "failed", "skipped")}
    for test, outcome, message in grouped(outcomes):
        report.row("tests", test=test, outcome=outcome, message=message[:MESSAGE])
    report.figures(**counts)
    if counts["failed"]:
        report.problem("tests", f"{counts['failed']} of {len(outcomes)} failed")


def grouped(outcomes: list[tuple[str, str, str]]) -> list[tuple[str, str, str]]:
    """Tests that failed, and the skipped ones of a file with the same reason as one."""
    failed = [entry for entry in outcomes if entry[1] == "failed"]
    skipped = Counter((test.partition("::")[0], reason) for test, outcome, reason in outcomes if outcome == "skipped")
    return [*failed, *((f"{file} ({count})", "skipped", reason) for (file, reason), count in skipped.items())]


def marked_files() -> list[str]:
    """Files with a test marked gpu, as paths from the root."""
    return [
        path.relative_to(ROOT).as_posix()
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if re.search(rf"{re.escape(MARK)}\b", path.read_text(encoding="utf-8"))
    ]


def read_junit(path: Path) -> list[tuple[str, str, str]]:
    """(test, passed or failed or skipped, message) of every test in a report. A file that cannot be imported has
    failed, or is skipped where a package is missing.
    """
    found = []
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        name = "::".join(filter(None, (case.get("classname"), case.get("name"))))
        parts = {part.tag: part for part in case}
        failure, skip = parts.get("failure", parts.get("error")), parts.get("skipped")
        if failure is None:
            found.append((name, "passed", "") if skip is None else (name, "skipped", skip.get("message", "")))
        elif failure.get("message") != "collection failure":
            found.append((name, "failed", failure.get("message", "")))
        elif missing := re.search(r"ModuleNotFoundError: No module named '(\w+)", failure.text or ""):
            found.append((name, "skipped", f"{missing[1]} is not installed"))
        else:
            found.append((name, "failed", (failure.text or "").strip().rpartition("\n")[2]))
    return found

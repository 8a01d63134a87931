"""The commands of the tutorials work as they are written: training as a dry run, everything else for real."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from turns import in_turn
from waiting import HANG_S

pytest.importorskip("torch")

ROOT = Path(__file__).parents[2]
PAGES = sorted(path.name for path in (ROOT / "docs" / "learn").glob("*.md"))
DRY = """
set -euo pipefail
mfleet() {
  case $1 in
    train) command mfleet "$@" --dry-run ;;
    report) command mfleet report --help ;; # of a run that was not made
    *) command mfleet "$@" ;;
  esac
}
"""


@pytest.fixture
def project(tmp_path) -> Path:
    """The repository as a reader has it, with this test's Python; examples are a copy, into which a tutorial writes."""
    folder = tmp_path / "project"
    shutil.copytree(ROOT / "examples", folder / "examples", ignore=shutil.ignore_patterns("__pycache__", "runs"))
    (folder / ".venv").mkdir()
    (folder / ".venv" / "engine").symlink_to(sys.prefix)
    quickstart = folder / "quickstart"  # without the setup that comes first
    quickstart.write_text('#!/usr/bin/env bash\n.venv/engine/bin/mfleet train experiment=quickstart --dry-run "$@"\n')
    quickstart.chmod(0o755)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("page", in_turn(PAGES, of=2))
def test_commands_work_as_written(page, project):
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / "docs" / "learn" / page).read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    script = DRY + "\n".join(blocks)
    done = subprocess.run(["bash", "-c", script], cwd=project, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("# outputs") == script.count("mfleet train experiment") + script.count("./quickstart")

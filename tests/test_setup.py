"""setup.sh on machines that lack something: one sentence, and no harm done."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from waiting import HANG_S

ROOT = Path(__file__).parents[1]
TOOLS = ["bash", "dirname", "uname", "df", "awk", "flock", "lscpu", "mkdir", "cat", "sha256sum", "cut", "rm", "grep"]
AWK = shutil.which("awk")
BROKEN_SHIM = "#!/bin/sh\necho 'pyenv: python3.11: command not found' >&2\nexit 127\n"


@pytest.fixture
def project(tmp_path) -> Path:
    """A copy of what setup.sh needs, and a PATH without any Python."""
    folder = tmp_path / "project"
    shutil.copytree(ROOT / "requirements", folder / "requirements")
    for name in ("setup.sh", "pyproject.toml"):
        shutil.copy(ROOT / name, folder / name)
    tools = tmp_path / "bin"
    tools.mkdir()
    for tool in TOOLS:
        path = shutil.which(tool)
        if path is None:
            pytest.skip(f"{tool} is not on this machine")
        (tools / tool).symlink_to(path)
    return folder


def program(project: Path, name: str, text: str) -> None:
    file = project.parent / "bin" / name
    file.unlink(missing_ok=True)
    file.write_text(text)
    file.chmod(0o755)


def setup(project: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PATH": str(project.parent / "bin")}
    command = [str(project / "setup.sh"), *arguments]
    return subprocess.run(["bash", *command], capture_output=True, text=True, timeout=HANG_S, env=environment)


def test_broken_shims_are_no_python(project):
    program(project, "python3.11", BROKEN_SHIM)
    done = setup(project)
    assert done.returncode == 1
    assert done.stderr.startswith("error: no Python 3.11 or 3.12")
    assert done.stderr.count("\n") == 1


def test_a_broken_shim_does_not_hide_a_sound_python(project):
    program(project, "python3.11", BROKEN_SHIM)
    log = project.parent / "asked"
    # The sound one runs until the environment would be made, and says what it was asked for.
    answers = "*ensurepip*) ;; *version_info*) echo 3 11 ;; -VV) echo 3.11 ;; *) exit 9 ;;"
    sound = f'#!/bin/sh\necho "$@" >>{log}\ncase "$*" in {answers} esac\n'
    program(project, "python3.12", sound)
    done = setup(project)
    assert done.returncode == 9
    assert "-m venv .venv/engine" in log.read_text()


@pytest.mark.parametrize(
    ("disk_kb", "memory_kb", "said"),
    [
        (5 << 20, 99 << 20, "has 5 GB of free disk; the environments need 8 GB."),
        (99 << 20, 4 << 20, "this machine has 4 GB of memory; a run needs 6 GB."),
    ],
)
def test_too_little_room_is_told_before_anything_is_made(project, disk_kb, memory_kb, said):
    program(project, "python3.11", "#!/bin/sh\nexit 0\n")
    program(project, "df", f"#!/bin/sh\necho head\necho /dev/x 0 0 {disk_kb} 1% /\n")
    program(project, "awk", f'#!/bin/sh\ncase "$*" in *MemTotal*) echo {memory_kb} ;; *) {AWK} "$@" ;; esac\n')
    done = setup(project)
    assert done.returncode == 1
    assert said in done.stderr
    assert not (project / ".venv" / "engine").exists()


def test_unknown_arguments_are_refused(project):
    done = setup(project, "--fast")
    assert done.returncode == 1
    assert "usage: ./setup.sh [--dev]" in done.stderr


def test_nothing_happens_when_nothing_changed():
    """In the environments that run this test, when setup.sh made them."""
    stamps = [ROOT / ".venv" / name / ".stamp" for name in ("engine", "episode")]
    if not all(stamp.exists() for stamp in stamps):
        pytest.skip("the environments were not made by setup.sh")
    before = [stamp.stat().st_mtime_ns for stamp in stamps]
    done = subprocess.run([str(ROOT / "setup.sh")], capture_output=True, text=True, timeout=HANG_S)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert [stamp.stat().st_mtime_ns for stamp in stamps] == before

"""No verifier breaks out: not as root, not as an ordinary user, not where the kernel gives no namespaces."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from waiting import HANG_S

from megatron_fleet.config.errors import UserError
from megatron_fleet.config.schema import EnvConfig
from megatron_fleet.embedded_fleet import verifier_client
from megatron_fleet.embedded_fleet.sandbox import MACHINES
from megatron_fleet.embedded_fleet.tasks import EmbeddedSession, generate
from megatron_fleet.embedded_fleet.verifier_client import OPTIONAL_LAYERS, Limits, VerifierClient
from megatron_fleet.envs.embedded_server import EmbeddedFleet

HERE = Path(__file__).parent
HOST_FILES = ("verifier_host.py", "verify.py", "sandbox.py")
SOMEBODY = 54321
WITHOUT_NAMESPACES = ("unshare", "-Ur", "sh", "-c", 'echo 0 > /proc/sys/user/max_user_namespaces && exec "$0" "$@"')


@pytest.fixture
def stage() -> Iterator[Path]:
    """A folder that every user can read: the host's files, the attacks, and a folder for loot that all may change."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        folder = Path(name)
        for file in (*(Path(verifier_client.__file__).with_name(n) for n in HOST_FILES), HERE / "verifier_attacks.py"):
            shutil.copy(file, folder)
        (folder / "loot").mkdir()
        (folder / "loot" / "file").write_text("secret")
        for path in (folder, *folder.rglob("*")):
            path.chmod(0o777)
        yield folder


def python_of_all() -> str:
    """An interpreter that every user can start."""
    for python in (sys.executable, "/usr/bin/python3"):
        says = [python, "-c", "import sys; sys.exit(sys.version_info < (3, 11))"]
        try:
            if subprocess.run(says, user=SOMEBODY, check=False, cwd="/", capture_output=True).returncode == 0:
                return python
        except OSError:
            continue
    pytest.skip("no Python 3.11 that another user can start")


@pytest.mark.parametrize("who", ["this user", "another user", "no namespaces"])
def test_no_attack_works(stage, who):
    before, python, options = (), sys.executable, {}
    if who == "another user":
        if os.getuid() != 0:
            pytest.skip("only root can be another user; this user is an ordinary one")
        python, options = python_of_all(), {"user": SOMEBODY, "group": SOMEBODY, "extra_groups": []}
    if who == "no namespaces":
        before = WITHOUT_NAMESPACES
        if subprocess.run([*before, "true"], capture_output=True, check=False).returncode != 0:
            pytest.skip("this user may not make namespaces: what `this user` tests is this case")
    prey = subprocess.Popen(["sleep", "100"], **options)
    priority = os.getpriority(os.PRIO_PROCESS, 0)
    try:
        command = [*before, python, stage / "verifier_attacks.py", stage / "verifier_host.py", str(prey.pid)]
        done = subprocess.run(
            [*command, stage / "loot"], cwd="/", capture_output=True, text=True, timeout=600, check=False, **options
        )
        assert done.returncode == 0, done.stderr
        assert prey.poll() is None and os.getpriority(os.PRIO_PROCESS, prey.pid) == priority
    finally:
        prey.kill()
        prey.wait()
    said = json.loads(done.stdout)
    worked = {name for name, (value, _) in said["verdicts"].items() if value is not None}
    assert worked - {"a permitted call"} == {"an honest verifier"}
    assert ("a permitted call" in worked) == (os.uname().machine == "x86_64")  # the calls do reach the kernel
    assert len(said["verdicts"]) > 25 and said["left"] == []
    assert [path.name for path in (stage / "loot").iterdir()] == ["file"]
    assert (stage / "loot" / "file").read_text() == "secret"


def test_a_machine_without_a_layer_is_told_of(monkeypatch, tmp_path):
    """Without the filter of system calls nothing starts; without another layer only where all are asked for."""
    fake = tmp_path / "sandbox.py"
    monkeypatch.setattr(verifier_client, "SANDBOX", fake)
    fake.write_text("print('{}')")
    assert verifier_client.check_sandbox("full") == ((), "")
    fake.write_text("""print('{"namespaces": "unshare: Operation not permitted"}')""")
    missing, note = verifier_client.check_sandbox("available")
    assert missing == ("namespaces",) and "namespaces (unshare: Operation not permitted)" in note
    with pytest.raises(UserError, match=r"env.sandbox=full: .*namespaces"):
        verifier_client.check_sandbox("full")
    fake.write_text("""print('{"system calls": "seccomp: Invalid argument"}')""")
    with pytest.raises(UserError, match="seccomp: Invalid argument"):
        verifier_client.check_sandbox("available")


async def test_a_host_that_lost_a_layer_runs_no_verifier(monkeypatch, tmp_path):
    """A kernel's or a container's rules may change while a run lasts, which restarts its hosts and servers."""
    for name in HOST_FILES:
        shutil.copy(Path(verifier_client.__file__).with_name(name), tmp_path)
    with (tmp_path / "sandbox.py").open("a") as file:
        file.write("\n\nreal = enter\n\ndef enter():\n    return real() | {'landlock': 'disabled'}\n")
    monkeypatch.setattr(verifier_client, "HOST", tmp_path / "verifier_host.py")
    database = EmbeddedSession(generate(seed=2, per_env=1)[0]).world.current()
    verifier = "def verify(env):\n    return 1"
    monkeypatch.setattr(verifier_client, "GRACE_S", 0.1)
    client = VerifierClient(Limits(wall_s=0.1), may_lack=set(OPTIONAL_LAYERS) - {"landlock"})
    try:
        assert client._host.wait(HANG_S) == 1
        assert (await client.verify(verifier, database, database, None, None)).value is None
    finally:
        client.close()
    client = VerifierClient(Limits(wall_s=HANG_S))
    try:
        assert (await client.verify(verifier, database, database, None, None)).value == 1
    finally:
        client.close()


def test_the_embedded_server_is_told_what_the_run_demands(tmp_path):
    """It checks its machine at every start, so also where it replaces one that ended."""
    told = tmp_path / "told"
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "$@" > {told}\nexit 1\n')
    python.chmod(0o755)
    with pytest.raises(UserError, match="ended with status 1"):
        EmbeddedFleet().start(EnvConfig(sandbox="full"), tmp_path / "log", python)
    assert "--sandbox full" in told.read_text()


def test_the_embedded_server_does_not_start_without_a_layer_that_is_demanded(monkeypatch, tmp_path):
    (tmp_path / "sandbox.py").write_text("""print('{"landlock": "disabled"}')""")
    monkeypatch.setattr(verifier_client, "SANDBOX", tmp_path / "sandbox.py")
    pytest.importorskip("openenv")
    from megatron_fleet.embedded_fleet import server

    monkeypatch.setattr(sys, "argv", ["server", "--sandbox", "full"])
    with pytest.raises(SystemExit, match=r"error: env.sandbox=full: .*landlock"):
        server.main()


@pytest.mark.parametrize(
    ("machine", "header"),
    [("x86_64", "x86_64-linux-gnu/asm/unistd_64.h"), ("aarch64", "asm-generic/unistd.h")],
)
def test_system_calls_have_the_kernels_numbers(machine, header):
    file = Path("/usr/include", header)
    if not file.is_file():
        pytest.skip(f"{file} is not installed (linux-libc-dev)")
    pairs = re.findall(r"^#define __NR(?:3264)?_(\w+) (\d+)$", file.read_text(), re.M)
    numbers = {name: int(number) for name, number in pairs}
    _, clone, capset, pivot_root, allowed = MACHINES[machine]
    assert {"clone": clone, "capset": capset, "pivot_root": pivot_root, **allowed}.items() <= numbers.items()

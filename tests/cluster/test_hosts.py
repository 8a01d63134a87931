"""The hosts that other tests use: apart from each other, reachable by address, and gone without a trace."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from namespace_hosts import ROOT, Hosts, why_not
from waiting import HANG_S, wait_until

pytestmark = pytest.mark.skipif(bool(reason := why_not()), reason=reason or "")

SERVE = """
import socket
listener = socket.create_server(('', 5000))
print(socket.gethostname(), flush=True)
listener.accept()[0].send(b'hi')
"""
UNREACHED = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], 5000), 1)
except OSError as error:
    print(type(error).__name__)
"""
CALL = "import socket; print(socket.create_connection(('n2', 5000), 60).recv(9).decode())"


@pytest.fixture(scope="module")
def hosts(tmp_path_factory) -> Iterator[Hosts]:
    with Hosts(["n1", "n2"], visible=[tmp_path_factory.getbasetemp()]) as hosts:
        yield hosts


def mentions(mark: str) -> list[int]:
    """Processes of this machine, on whatever host, whose command line has ``mark``."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            try:
                if mark in (folder / "cmdline").read_text() and ") Z " not in (folder / "stat").read_text():
                    found.append(int(folder.name))
            except OSError:
                continue
    return found


def test_hosts_reach_each_other_by_name_and_are_not_this_machine(hosts):
    server = hosts.run("n2", [sys.executable, "-c", SERVE], stdout=subprocess.PIPE)
    assert server.stdout is not None and server.stdout.readline() == "n2\n"
    assert hosts.output("n1", [sys.executable, "-c", CALL]) == "hi\n"
    assert server.wait(HANG_S) == 0
    server.stdout.close()
    # The same port on the other host and here is free: loopback and all addresses belong to each host alone.
    assert hosts.output("n2", [sys.executable, "-c", UNREACHED, "n1"]) == "ConnectionRefusedError\n"


def test_memory_and_temporary_files_are_private_and_the_tests_folder_is_shared(hosts, tmp_path):
    hosts.output("n1", ["sh", "-c", f"echo 1 > /dev/shm/mf-x; echo 1 > /tmp/mf-x; echo hello > {tmp_path}/from-n1"])
    assert hosts.output("n2", ["sh", "-c", f"ls /dev/shm /tmp; cat {tmp_path}/from-n1; ls {ROOT}"]).count("mf-x") == 0
    assert (tmp_path / "from-n1").read_text() == "hello\n"
    assert not Path("/dev/shm/mf-x").exists()
    assert "pyproject.toml" in hosts.output("n2", ["ls", ROOT])


def test_orphans_are_reaped(hosts):
    hosts.output("n1", ["sh", "-c", "(sleep 0.1; exit 3) & exit 0"])
    states = ["sh", "-c", "cat /proc/[0-9]*/stat 2>/dev/null | grep -c ') Z ' || true"]
    wait_until(lambda: hosts.output("n1", states) == "0\n")


def test_power_off_kills_everything_at_once_and_power_on_begins_anew(hosts, tmp_path):
    mark = f"mf-mark-{os.getpid()}"
    stubborn = f"trap '' TERM INT HUP; : {mark}; touch {tmp_path}/ready; touch /tmp/mf-old; while :; do sleep 1; done"
    process = hosts.run("n2", ["sh", "-c", stubborn])
    detached = f"import time; time.sleep(1000)  # {mark}"
    hosts.output("n2", ["sh", "-c", f"setsid {sys.executable} -c '{detached}' >/dev/null 2>&1 &"])
    wait_until((tmp_path / "ready").exists)
    assert len(mentions(mark)) >= 2
    hosts.power_off("n2")
    assert process.wait(HANG_S) != 0
    assert mentions(mark) == []
    hosts.power_on("n2")
    assert "mf-old" not in hosts.output("n2", ["ls", "/tmp"])
    assert hosts.output("n2", ["hostname"]) == "n2\n"


def test_an_unplugged_host_lives_on_unreachable(hosts):
    server = hosts.run("n2", [sys.executable, "-c", SERVE], stdout=subprocess.PIPE)
    assert server.stdout is not None and server.stdout.readline() == "n2\n"
    hosts.unplug("n2")
    assert hosts.output("n1", [sys.executable, "-c", UNREACHED, hosts.addresses["n2"]]) == "TimeoutError\n"
    assert server.poll() is None
    hosts.plug("n2")
    assert hosts.output("n1", [sys.executable, "-c", CALL]) == "hi\n"
    assert server.wait(HANG_S) == 0
    server.stdout.close()


def test_a_host_that_comes_back_is_reached_at_once(hosts):
    for _ in range(2):
        server = hosts.run("n2", [sys.executable, "-c", SERVE], stdout=subprocess.PIPE)
        assert server.stdout is not None and server.stdout.readline() == "n2\n"
        assert hosts.output("n1", [sys.executable, "-c", CALL]) == "hi\n"
        server.stdout.close()
        server.wait(HANG_S)
        hosts.power_off("n2")
        hosts.power_on("n2")


def namespaces() -> set[str]:
    """Network namespaces that some process of this machine is in."""
    found = set()
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                found.add(os.readlink(folder / "ns" / "net"))
            except OSError:
                continue
    return found


def test_nothing_stays():
    links, mark = os.listdir("/sys/class/net"), f"mf-end-{os.getpid()}"
    with Hosts(["a", "b"]) as hosts:
        hosts.run("a", ["sh", "-c", f": {mark}; sleep 1000"])
        own = {hosts.output(name, ["readlink", "/proc/self/ns/net"]).strip() for name in ("a", "b")}
        wait_until(lambda: bool(mentions(mark)))
        assert len(own) == 2
        assert own <= namespaces()
    assert mentions(mark) == []
    wait_until(lambda: not own & namespaces())
    assert os.listdir("/sys/class/net") == links
    assert not hosts.folder.exists()


def test_nothing_but_the_folder_stays_when_the_test_process_is_killed(tmp_path):
    mark = f"mf-orphan-{os.getpid()}"
    script = tmp_path / "program.py"
    script.write_text(
        "import time\n"
        "from namespace_hosts import Hosts\n"
        "with Hosts(['a', 'b']) as hosts:\n"
        f"    hosts.run('a', ['sh', '-c', ': {mark}; sleep 1000'])\n"
        "    print(hosts.folder, hosts.output('b', ['readlink', '/proc/self/ns/net']), flush=True)\n"
        "    time.sleep(1000)\n"
    )
    environ = os.environ | {"PYTHONPATH": str(ROOT / "tests")}
    owner = subprocess.Popen([sys.executable, script], env=environ, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    folder, namespace = owner.stdout.readline().split()
    wait_until(lambda: bool(mentions(mark)))
    assert namespace in namespaces()
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    owner.stdout.close()
    wait_until(lambda: namespace not in namespaces() and mentions(mark) == [])
    shutil.rmtree(folder)

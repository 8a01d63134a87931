"""Several hosts on one machine, made of Linux namespaces and joined by a bridge: for tests that need more than one.

Each host has its own name, address, process ids, /proc, /dev/shm, /tmp and System V IPC; files elsewhere are shared, as
on a network file system. Nothing is registered anywhere (no ``ip netns``): everything vanishes with the processes, and
these are killed when the test process dies.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).parents[1]
NETWORK = "10.77.0"
START_DEADLINE_S = 300.0

_REAP_UNTIL_KILLED = """\
import os, signal, time
for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
while True:
    try:
        os.wait()
    except ChildProcessError:
        time.sleep(0.05)
"""
"""The first process of a host: it has to reap what its parents left."""


def why_not() -> str | None:
    """The reason why there can be no hosts here, for ``pytest.mark.skipif``; ``None`` when there can."""
    if os.geteuid():
        return "hosts made of namespaces need root"
    missing = [name for name in ("ip", "unshare", "nsenter", "setpriv") if shutil.which(name) is None]
    if missing:
        return f"hosts made of namespaces need {', '.join(missing)} (packages iproute2 and util-linux)"
    probe = ["unshare", "--net", "--mount", "--pid", "--fork", "ip", "link", "add", "bridge0", "type", "bridge"]
    done = subprocess.run(probe, capture_output=True, text=True, timeout=START_DEADLINE_S, check=False)
    return None if done.returncode == 0 else f"namespaces or bridges are not allowed here: {done.stderr.strip()}"


class Hosts:
    """Hosts by name, all powered on; ends them on leaving the ``with`` block."""

    def __init__(self, names: Sequence[str], visible: Sequence[Path] = ()) -> None:
        """Args: ``visible``: folders below /tmp that all hosts share, as the test's own; /tmp itself is private."""
        self.addresses = {name: f"{NETWORK}.{10 + i}" for i, name in enumerate(names)}
        self.folder = Path(tempfile.mkdtemp(prefix="mf-hosts-"))
        """Shared by all hosts; its path is short enough for unix sockets."""
        self._visible = [*visible, self.folder, ROOT, Path(sys.prefix), Path(sys.base_prefix)]
        self._holders: dict[str, subprocess.Popen[str]] = {}
        self._inits: dict[str, int] = {}
        self._cables: dict[str, str] = {}
        self._made_cables = 0
        self._switch: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        try:
            known = [f"{address} {name}" for name, address in self.addresses.items()]
            (self.folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *known, ""]))
            make = "ip link add bridge0 type bridge && ip link set bridge0 up && echo up && exec sleep infinity"
            self._switch = _hold(["unshare", "--net", "sh", "-c", make])
            for name in self.addresses:
                self.power_on(name)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill every process on every host and remove the shared folder. Idempotent."""
        for name in list(self._inits):
            self.power_off(name)
        if self._switch is not None:
            self._switch.kill()
            _release(self._switch)
        shutil.rmtree(self.folder, ignore_errors=True)

    def power_on(self, name: str) -> None:
        """Start a host that is off, with nothing of its earlier life."""
        namespaces = ["--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        holder = _hold(["unshare", *namespaces, "sh", "-euc", self._boot_script(name)])
        self._holders[name] = holder
        self._inits[name] = int(Path(f"/proc/{holder.pid}/task/{holder.pid}/children").read_text().split()[0])
        self._connect(name)

    def _boot_script(self, name: str) -> str:
        """Shell commands of a host's first process, which becomes the reaper of orphans."""
        temporary = Path(tempfile.gettempdir())
        inside = [path for path in dict.fromkeys(p.resolve() for p in self._visible) if path.is_relative_to(temporary)]
        # Bind mounts below /dev/shm survive while /tmp is replaced.
        kept = {path: f"/dev/shm/{i}" for i, path in enumerate(inside)}
        return "\n".join(
            [
                f"hostname {name}",
                f"mount --bind {shlex.quote(str(self.folder / 'hosts'))} /etc/hosts",
                "mount -t tmpfs tmpfs /dev/shm",
                *(f"mkdir {at}; mount --bind {shlex.quote(str(path))} {at}" for path, at in kept.items()),
                f"mount -t tmpfs -o mode=1777 tmpfs {shlex.quote(str(temporary))}",
                *(
                    f"mkdir -p {shlex.quote(str(path))}; mount --move {at} {shlex.quote(str(path))}; rmdir {at}"
                    for path, at in kept.items()
                ),
                "ip link set lo up",
                "echo up",
                f"exec {sys.executable} -IS -c {shlex.quote(_REAP_UNTIL_KILLED)}",
            ]
        )

    def power_off(self, name: str) -> None:
        """Kill every process on the host at once, as a power failure does."""
        os.kill(self._inits.pop(name), signal.SIGKILL)
        _release(self._holders.pop(name))
        self._cables.pop(name, None)

    def unplug(self, name: str) -> None:
        """Cut the host's network; its processes go on."""
        self._in_switch("ip", "link", "set", self._cables[name], "down")

    def plug(self, name: str) -> None:
        """Undo `unplug`."""
        self._in_switch("ip", "link", "set", self._cables[name], "up")

    def _connect(self, name: str) -> None:
        init, self._made_cables = str(self._inits[name]), self._made_cables + 1
        # A name of its own: the kernel removes the cable of a dead host a moment later.
        cable = self._cables[name] = f"cable{self._made_cables}"
        self._in_switch("ip", "link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", init)
        self._in_switch("ip", "link", "set", cable, "master", "bridge0", "up")
        inside, address = ["nsenter", "-t", init, "--net", "ip"], self.addresses[name]
        # The same after power_on, so that what other hosts remember (ARP) stays true.
        hardware = "02:00:" + ":".join(f"{int(part):02x}" for part in address.split("."))
        _do(*inside, "link", "set", "eth0", "address", hardware, "up")
        _do(*inside, "addr", "add", f"{address}/24", "dev", "eth0")
        _do(*inside, "route", "add", "default", "dev", "eth0")

    def run(
        self, name: str, command: Sequence[str | Path], env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[str]:
        """Start ``command`` on a host, in this process's folder and, unless ``env`` is given, its environment.

        The process leads a process group of its own, which `stop` ends. ``options``: of Popen.
        """
        enter = ["nsenter", "-t", str(self._inits[name]), "--net", "--uts", "--ipc", "--mount", "--pid", "--"]
        # Entering the mount namespace changes the folder to its root.
        where = ["env", "-C", str(options.pop("cwd", None) or Path.cwd())]
        return subprocess.Popen(
            [*enter, *where, *map(str, command)],
            env=None if env is None else dict(env),
            stdin=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
            **options,
        )

    def output(
        self, name: str, command: Sequence[str | Path], env: Mapping[str, str] | None = None, timeout_s: float = 300
    ) -> str:
        """Run ``command`` on a host to its end; what it wrote to stdout. Fails the test when it fails."""
        process = self.run(name, command, env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        try:
            out, errors = process.communicate(timeout=timeout_s)
        finally:
            stop(process)
        assert process.returncode == 0, f"{command} on {name}: status {process.returncode}\n{out}\n{errors}"
        return out

    def _in_switch(self, *command: str) -> None:
        assert self._switch is not None
        _do("nsenter", "-t", str(self._switch.pid), "--net", *command)


def stop(process: subprocess.Popen[str]) -> None:
    """Kill what `Hosts.run` started, with its process group. Idempotent."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _hold(command: Sequence[str]) -> subprocess.Popen[str]:
    """Start what holds a namespace and says ``up``; it dies with this process."""
    process = subprocess.Popen(
        ["setpriv", "--pdeathsig", "KILL", *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    if process.stdout.readline() != "up\n":
        process.kill()
        raise OSError(f"{command[0]} did not make its namespaces: {process.communicate()[1].strip()}")
    return process


def _release(process: subprocess.Popen[str]) -> None:
    """Reap what `_hold` started; what it says when it is killed is of no interest."""
    process.communicate()


def _do(*command: str) -> None:
    subprocess.run(command, check=True, timeout=START_DEADLINE_S)

"""A real Slurm cluster on hosts made of namespaces: a controller on one of them, a slurmd on each of the others."""

from __future__ import annotations

import os
import secrets
import shutil
import stat
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

from namespace_hosts import START_DEADLINE_S, Hosts, stop

CONTROLLER = "ctl"
_PROGRAMS = ("slurmctld", "slurmd", "munged", "srun", "sbatch", "sinfo")
_CONFIGURATION = """\
ClusterName=test
SlurmctldHost={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,bf_interval=1
SlurmdParameters=config_overrides
KillWait=5
SlurmdTimeout=10
MessageTimeout=5
"""


def why_not() -> str | None:
    """The reason why there can be no Slurm here, besides that of `namespace_hosts.why_not`; ``None`` when there can."""
    missing = [name for name in _PROGRAMS if shutil.which(name) is None]
    return f"needs {', '.join(missing)} (packages slurmctld, slurmd, slurm-client and munge)" if missing else None


class Slurm:
    """Slurm on ``hosts``, which have one named `CONTROLLER`; all others are nodes. Ends with them."""

    def __init__(self, hosts: Hosts, cpus: int = 4, gpus: int = 0) -> None:
        """Args: ``cpus`` and ``gpus``: that each node claims to have; 0 GPUs: Slurm knows of none (no GRES)."""
        self.hosts = hosts
        self.nodes = [name for name in hosts.addresses if name != CONTROLLER]
        self._folder = hosts.folder / "slurm"
        self._cpus = cpus
        self.gpus = gpus
        self._daemons: dict[str, subprocess.Popen[str]] = {}
        self.environ = os.environ | {"SLURM_CONF": str(self._folder / "slurm.conf")}
        """Environment of Slurm's commands."""

    def __enter__(self) -> Self:
        self._configure()
        folder = self._folder
        key = folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        files = [f"--{name}={folder}/munge.{name[:-5]}" for name in ("seed-file", "pid-file")]
        munge = ["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={folder}/munge.socket", *files]
        self._start("munged", CONTROLLER, munge)
        self._start("slurmctld", CONTROLLER, ["slurmctld", "-D", "-c"])
        for name in self.nodes:
            self.start_node(name)
        self.wait_until_idle()
        return self

    def __exit__(self, *_: object) -> None:
        for daemon in self._daemons.values():
            stop(daemon)

    def start_node(self, name: str) -> None:
        """Start Slurm's daemon of a node, also after `Hosts.power_on`."""
        self._start(f"slurmd-{name}", name, ["slurmd", "-D", "-N", name, "-c"])

    def wait_until_idle(self) -> None:
        """Wait until every node takes jobs and has none. Raises TimeoutError with what the daemons logged."""
        self._wait_for_nodes("idle", lambda states: set(states) == {"idle"} and len(states) == len(self.nodes))

    def start_requeued(self, id_: str, *changes: str) -> None:
        """Start a requeued job; Slurm would wait for two minutes.

        First, nodes must have ended what is left of its previous attempt, or it may get the exit status of that. And
        they refuse a job whose credential is not at least a second younger than the end of the previous attempt.
        """
        self._wait_for_nodes(
            "without a job that completes", lambda states: not any(state.startswith("completing") for state in states)
        )
        self.output(["scontrol", "update", f"JobId={id_}", "StartTime=now+2", *changes])

    def _wait_for_nodes(self, what: str, true: Callable[[list[str]], bool]) -> None:
        deadline = time.monotonic() + START_DEADLINE_S
        command = ["timeout", "30", "sinfo", "-h", "-N", "-o", "%T"]
        while True:
            sinfo = self.hosts.run(
                CONTROLLER, command, self.environ, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            ).communicate()[0]
            if sinfo and true(sinfo.split()):
                return
            if time.monotonic() > deadline:
                logs = "\n".join(log.read_text()[-2000:] for log in sorted(self._folder.glob("*.log")))
                raise TimeoutError(f"Slurm's nodes are not {what}: {sinfo}\n{logs}")
            time.sleep(0.05)

    def output(self, command: Sequence[str | Path], timeout_s: float = 300) -> str:
        """Run one of Slurm's commands to its end; what it wrote to stdout. Fails the test when it fails."""
        return self.hosts.output(CONTROLLER, command, self.environ, timeout_s)

    def _start(self, log: str, host: str, command: Sequence[str]) -> None:
        with (self._folder / f"{log}.log").open("a") as out:
            self._daemons[log] = self.hosts.run(host, command, self.environ, stdout=out, stderr=subprocess.STDOUT)

    def _configure(self) -> None:
        folder = self._folder
        for path in (folder, folder / "state", *(folder / f"spool-{name}" for name in self.nodes)):
            path.mkdir()
        gres = self._configure_gpus() if self.gpus else ""
        nodes = [f"NodeName={name} CPUs={self._cpus} RealMemory=1000 State=UNKNOWN {gres}" for name in self.nodes]
        partition = "PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP"
        text = _CONFIGURATION.format(controller=CONTROLLER, folder=folder) + ("GresTypes=gpu\n" if gres else "")
        (folder / "slurm.conf").write_text("\n".join([text, *nodes, partition, ""]))
        (folder / "cgroup.conf").write_text("CgroupAutomount=no\n")

    def _configure_gpus(self) -> str:
        """Make devices that stand for GPUs, the same files on every node; what the line of a node says of them."""
        for index in range(self.gpus):
            # /dev/null
            os.mknod(self._folder / f"gpu{index}", 0o600 | stat.S_IFCHR, os.makedev(1, 3))
        files = f"{self._folder}/gpu[0-{self.gpus - 1}]"
        (self._folder / "gres.conf").write_text(f"Name=gpu Type=h100 File={files}\n")
        return f"Gres=gpu:h100:{self.gpus}"

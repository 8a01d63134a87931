"""Launching of trainer ranks as processes of this host, and supervision of their exit."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from megatron_fleet.cluster.joined_nodes import RanksOfHost
from megatron_fleet.cluster.rank_identity import without_rank_variables
from megatron_fleet.config.errors import UserError
from megatron_fleet.config.secrets import STORE, without_secrets
from megatron_fleet.config.sections.hosted import HOSTED

POLL_S = 0.05
LAST_LINES = 2000
"""Bytes at the end of a rank's log that are searched for its last line."""
_PR_SET_PDEATHSIG = 1
ON_CPUS = {"OMP_WAIT_POLICY": "passive"}
"""Variables of ranks on CPUs, unless they are set. PyTorch's libgomp spins at barriers otherwise: threads that wait
for one that another run's threads displaced keep a core from both. ``passive`` sets its GOMP_SPINCOUNT to 0 as well."""


class RankStarter(Protocol):
    """Starter of ranks. `trainer.group` requests a set of ranks, and another one when that set is lost."""

    async def start(self, address: str, token: str) -> None:
        """Start all ranks; they connect to ``address`` and authenticate with ``token``.

        Raises:
            ConnectionError: a host was lost meanwhile.
            UserError: a host that was lost before does not come back.
        """
        ...

    async def how_ended(self, rank: int) -> str:
        """Describe how a rank that closed its connection ended."""
        ...

    def failed(self) -> str | None:
        """Describe how the first rank found dead ended; ``None``: all ranks are alive as far as is known."""
        ...

    async def stop(self, deadline_s: float) -> None:
        """Wait for all ranks to end, then kill the rest. Idempotent."""
        ...


class ExternalRanks:
    """Ranks that torchrun, srun or another external launcher starts and restarts."""

    def __init__(self, logs: Path) -> None:
        """Args: ``logs``: folder that the ranks write to."""
        self._logs = logs

    async def start(self, address: str, token: str) -> None:
        """Do nothing: external ranks connect by themselves."""

    async def how_ended(self, rank: int) -> str:
        """Point to the rank's log and its launcher, since the exit status is not known here."""
        return (
            f"rank {rank} closed its connection; see {self._logs / f'rank_{rank}.log'}, and the output of its launcher"
        )

    def failed(self) -> str | None:
        """Return ``None``: the state of external ranks is not known here."""
        return None

    async def stop(self, deadline_s: float) -> None:
        """Do nothing: external ranks end when their connection closes."""


class LocalRanks:
    """Ranks as child processes of this host; each writes to ``<logs>/rank_N.log`` and dies with this process."""

    def __init__(self, ranks: RanksOfHost, logs: Path, command: Sequence[str] | None = None) -> None:
        """Args: ``command``: starts a rank, whose identity is in its environment."""
        self._ranks, self._logs = ranks, logs
        self._command = list(command or (sys.executable, "-m", "megatron_fleet.cli", "rank"))
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    @property
    def pids(self) -> list[int]:
        """Process ids, in the order of the ranks."""
        return [process.pid for process in self._processes.values()]

    async def start(self, address: str, token: str) -> None:
        self._logs.mkdir(parents=True, exist_ok=True)
        mine = self._ranks
        inherited = without_secrets(without_rank_variables(os.environ), STORE)
        common = {
            "MFLEET_WORLD_SIZE": str(mine.world_size),
            "MFLEET_LOCAL_WORLD_SIZE": str(len(mine.ranks)),
            "MFLEET_CONTROLLER": address,
            "MFLEET_TOKEN": token,
            "OMP_NUM_THREADS": str(mine.threads),
            "PYTHONUNBUFFERED": "1",
        }
        if mine.visible is None:
            inherited = ON_CPUS | inherited
        else:
            common["CUDA_VISIBLE_DEVICES"] = mine.visible
        for i, rank in enumerate(mine.ranks):
            own = {"MFLEET_RANK": str(rank), "MFLEET_LOCAL_RANK": str(i)}
            self._processes[rank] = spawn(self._command, inherited | common | own, self._log_of(rank))

    async def how_ended(self, rank: int) -> str:
        deadline = time.monotonic() + 1.0  # the connection closes a moment before the process is gone
        while (status := _status(self._processes[rank])) is None and time.monotonic() < deadline:
            await asyncio.sleep(POLL_S)
        return self._in_words(rank, status)

    def failed(self) -> str | None:
        return next(iter(self.ended().values()), None)

    def ended(self) -> dict[int, str]:
        """Describe how each rank that has ended did so, by rank."""
        statuses = {rank: _status(process) for rank, process in self._processes.items()}
        return {rank: self._in_words(rank, status) for rank, status in statuses.items() if status is not None}

    async def stop(self, deadline_s: float) -> None:
        """See `RankStarter.stop`. Ranks are reaped last, so that no process group id can have been reused before."""
        deadline = time.monotonic() + deadline_s
        while self._any_alive() and time.monotonic() < deadline:
            await asyncio.sleep(POLL_S)
        for process in self._processes.values():
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)  # with what the rank started
        while self._any_alive():  # a driver may take seconds to release the devices of a killed process
            await asyncio.sleep(POLL_S)
        for process in self._processes.values():
            process.wait()
        self._processes = {}

    def _any_alive(self) -> bool:
        return None in map(_status, self._processes.values())

    def _log_of(self, rank: int) -> Path:
        return self._logs / f"rank_{rank}.log"

    def _in_words(self, rank: int, status: int | None) -> str:
        if status is None:
            how = "closed its connection"
        elif status < 0:
            how = f"was killed by {signal.Signals(-status).name}"
        else:
            how = f"ended with status {status}"
        last = last_line(self._log_of(rank))
        return f"rank {rank} {how}{f' ({last})' if last else ''}; its log is {self._log_of(rank)}"


def last_line(log: Path) -> str:
    """Return the last line of a log that is not empty."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - LAST_LINES))
        lines = file.read().decode(errors="replace").strip().splitlines()
    return lines[-1].strip() if lines else ""


def _status(process: subprocess.Popen[bytes]) -> int | None:
    """Return the exit status (negative: the signal), ``None`` while the process runs. Does not reap it."""
    if process.returncode is not None:
        return process.returncode
    end = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if end is None:
        return None
    return end.si_status if end.si_code == os.CLD_EXITED else -end.si_status


def spawn(command: Sequence[str], environment: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    """Start a process that writes to the end of ``log`` and dies with this one."""
    with log.open("ab") as file:
        # Its own session shields it from the terminal's Ctrl-C, and makes it a process group that can be killed.
        return subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
            preexec_fn=die_with_parent(),
        )


def die_with_parent() -> Callable[[], None]:
    """Return a ``preexec_fn`` that makes the child receive SIGKILL when its parent dies."""
    libc, parent = ctypes.CDLL(None, use_errno=True), os.getpid()

    def prepare() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(143)

    return prepare


def in_hosted_environment() -> bool:
    """Whether this is the environment of ``./setup.sh --hosted``, without torch and vLLM."""
    return Path(sys.prefix).name == HOSTED


def episode_python() -> Path:
    """Return the interpreter of the episode environment: ``MFLEET_EPISODE_PYTHON``, else the one that setup installs
    next to the engine environment; the hosted environment is both.

    Raises:
        UserError: it is missing.
    """
    given = os.environ.get("MFLEET_EPISODE_PYTHON")
    if not given and in_hosted_environment():
        return Path(sys.executable)
    python = Path(given) if given else Path(sys.prefix).parent / "episode" / "bin" / "python"
    if not (python.is_file() and os.access(python, os.X_OK)):
        if given:
            raise UserError(f"MFLEET_EPISODE_PYTHON={given} is not a program; name the episode environment's python.")
        raise UserError(
            f"{python}: the episode environment is missing; run ./setup.sh, or name it in MFLEET_EPISODE_PYTHON."
        )
    return python.absolute()


def write_output_to(log: Path) -> None:
    """Append this process's stdout and stderr, and those of children started later, to ``log``."""
    log.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    for stream in (1, 2):
        os.dup2(target, stream)
    os.close(target)

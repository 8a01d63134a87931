"""Start the ranks of a run on this machine, watch them, and end all of them when one ends badly.

Under torchrun or srun this module is not used: there every process already is a rank.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from megatron_fleet.config.load import dump_resolved
from megatron_fleet.config.schema import Config

POLL_S = 0.1
STOP_DEADLINE_S = 120.0
"""After the user's signal: time for the ranks to finish what they must and to stop Ray and the servers."""
FAILURE_DEADLINE_S = 15.0
"""After one rank died: the others hang in a collective that will never complete, so waiting longer helps nobody."""
USER_ERROR_STATUS = 2
ECHO_STATUS = 3
"""Exit status of a rank that only stopped because rank 0 failed."""
STRAGGLERS_S = 1.0
"""After a bad end: time for the services of a dead rank to tidy up behind it."""
_PR_SET_PDEATHSIG = 1


def rank_command(config_file: Path) -> list[str]:
    """The command of every rank; its environment says which one it is."""
    return [sys.executable, "-m", "megatron_fleet.cli", "train", "--resolved", str(config_file)]


def launch(config: Config, command: Callable[[Path], list[str]] = rank_command) -> int:
    """Run ``config.parallel.world_size`` ranks here and return the exit status of the run.

    Rank 0 writes to this terminal, the others to ``<out>/logs/rank_N.log``. SIGINT and SIGTERM are passed on once; a
    second one kills. When a rank fails the others are stopped, and its status is returned (128 + signal if killed).
    """
    out = Path(config.run.out)
    (out / "logs").mkdir(parents=True, exist_ok=True)
    config_file = out / "config.json"
    config_file.write_text(dump_resolved(config), encoding="utf-8")
    ranks = _Ranks(out / "logs")
    previous = {s: signal.signal(s, ranks.on_signal) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        ranks.start(command(config_file), config.parallel.world_size, config.policy.threads)
        return ranks.wait()
    finally:
        ranks.close()
        for number, handler in previous.items():
            signal.signal(number, handler)


@dataclass
class _Ranks:
    logs: Path
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    received: list[int] = field(default_factory=list)

    def start(self, command: list[str], world_size: int, threads: int) -> None:
        port = _free_port()
        for rank in range(world_size):
            if self.received:
                return
            environment = os.environ | {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world_size),
                "LOCAL_WORLD_SIZE": str(world_size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": str(threads),
                "PYTHONUNBUFFERED": "1",
            }
            self.processes.append(self._spawn(command, rank, environment))

    def _spawn(self, command: list[str], rank: int, environment: dict[str, str]) -> subprocess.Popen[bytes]:
        # A session of its own keeps the terminal's Ctrl-C away from the rank: it hears it once, from us.
        with ExitStack() as stack:
            log = None if rank == 0 else stack.enter_context(open(self.log_of(rank), "ab"))
            return subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=_die_with_parent(),
            )

    def log_of(self, rank: int) -> Path:
        return self.logs / f"rank_{rank}.log"

    def on_signal(self, number: int, _frame: FrameType | None) -> None:
        # Only noted here; the loop in `wait` acts.
        self.received.append(number)

    def wait(self) -> int:
        """Wait for all ranks; tell the reason of a bad end in one line on stderr."""
        failed: int | None = None
        deadline: float | None = None
        while None in [_status(p) for p in self.processes]:
            failed = self._failure(failed)
            if deadline is None and self.received:
                self._send(self.received[0])
                deadline = time.monotonic() + STOP_DEADLINE_S
            elif deadline is None and failed is not None:
                deadline = time.monotonic() + FAILURE_DEADLINE_S
                if not self._rank_0_will_tell(failed):
                    self._send(signal.SIGTERM)
            if len(self.received) > 1 or (deadline is not None and time.monotonic() > deadline):
                self._send(signal.SIGKILL)
            time.sleep(POLL_S)
        if self.received:
            name = "Ctrl-C" if self.received[0] == signal.SIGINT else "SIGTERM"
            print(f"mfleet: stopped by {name}; the same command goes on from the newest checkpoint.", file=sys.stderr)
            return 128 + self.received[0]
        failed = self._failure(failed)
        if failed is not None:
            return self._explain(failed)
        return 0

    def _send(self, number: int) -> None:
        for process in self.processes:
            if _status(process) is None:
                os.kill(process.pid, number)  # not Popen.send_signal, which may reap

    def close(self) -> None:
        """End what is left: the ranks, then what a rank started and did not end, which is all in its process group.

        The ranks are reaped last, so that no group's id can have passed to somebody else.
        """
        self._send(signal.SIGKILL)
        if any(_status(process) != 0 for process in self.processes):
            time.sleep(STRAGGLERS_S)
        for process in self.processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _failure(self, known: int | None) -> int | None:
        """The rank to blame: the first that failed, or rank 0 when that one's failure may be its echo."""
        failed = [rank for rank, p in enumerate(self.processes) if _status(p) not in (None, 0)]
        if known is None:
            return failed[0] if failed else None
        own_end = 0 in failed and (_status(self.processes[0]) or 0) > 0
        return 0 if own_end and self._rank_0_will_tell(known) else known

    def _rank_0_will_tell(self, rank: int) -> bool:
        """Bad input is found by every rank, and a failed rank 0 sends the others away before it is through itself."""
        return rank > 0 and _status(self.processes[rank]) in (USER_ERROR_STATUS, ECHO_STATUS)

    def _explain(self, rank: int) -> int:
        status = _status(self.processes[rank]) or 0
        if status < 0:
            how = f"was killed by {signal.Signals(-status).name}"
        else:
            how = f"ended with status {status}"
        if rank > 0:
            lines = self.log_of(rank).read_text(encoding="utf-8", errors="replace").strip().splitlines()
            last = f" ({lines[-1].strip()})" if lines else ""
            print(f"error: rank {rank} {how}{last}; its log is {self.log_of(rank)}.", file=sys.stderr)
        elif status < 0:
            print(f"error: rank 0 {how}.", file=sys.stderr)
        # A rank 0 that ended by itself has told its reason on this terminal.
        return 128 - status if status < 0 else status


def _status(process: subprocess.Popen[bytes]) -> int | None:
    """Exit status (negative: the signal), ``None`` while it runs. Does not reap."""
    if process.returncode is not None:
        return process.returncode
    end = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if end is None:
        return None
    return end.si_status if end.si_code == os.CLD_EXITED else -end.si_status


def _die_with_parent() -> Callable[[], None]:
    """For the child, before it becomes a rank: get SIGTERM when the launcher dies without a word (SIGKILL)."""
    libc, parent = ctypes.CDLL(None, use_errno=True), os.getpid()

    def prepare() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(143)

    return prepare


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])

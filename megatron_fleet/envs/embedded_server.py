"""Start, restart and stop of the embedded fleet's server as a child process."""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron_fleet.config.errors import UserError
from megatron_fleet.config.schema import EnvConfig
from megatron_fleet.config.secrets import without_secrets
from megatron_fleet.config.sections.env import FaultRatesConfig

POLL_S = 0.02
STOP_S = 5.0
HUNG_S = 120.0
"""Seconds without any answer after which a server whose process lives counts as hung."""
PROBE_INTERVAL_S = 5.0
"""Seconds between an answer of the server and the next probe."""
MAX_SESSIONS = 4096
"""Episodes that the server plays at once at most; each has a connection, and 130 KiB of its memory."""
TOKEN = "MFLEET_ENVIRONMENT_TOKEN"
"""Environment variable with the token that the server requires of its clients."""
STOPPED = "The embedded fleet's server was stopped."


@dataclass(frozen=True, slots=True)
class _Launch:
    """Arguments of `EmbeddedFleet.start`, for a restart."""

    config: EnvConfig
    log: Path
    python: str | Path | None
    seed: int
    environment: Mapping[str, str] | None
    host: str
    token: str


class ServerKilled(UserError):
    """A signal ended the server during start-up: a retry may help."""


class EmbeddedFleet:
    """One server process, owned by its starter; it also ends by itself when this process does.

    Attributes:
        url: base URL, set by `start`; a restart keeps it.
    """

    def __init__(self) -> None:
        self.url = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._launch: _Launch
        self._reserved: socket.socket
        self._changing = threading.Lock()
        self._stopped = threading.Event()
        self._hung: subprocess.Popen[bytes] | None = None

    def start(
        self,
        config: EnvConfig,
        log_path: Path,
        python: str | Path | None = None,
        seed: int = 0,
        environment: Mapping[str, str] | None = None,
        host: str = "127.0.0.1",
        token: str = "",
    ) -> str:
        """Start the server and wait until it listens.

        Args:
            config: provides the deadline ``start_timeout_s`` and the ``faults`` to inject.
            log_path: file to which the server's output is appended.
            python: interpreter of the episode environment; by default this process's.
            seed: seed of the faults.
            environment: environment variables of the server; by default this process's.
            host: address to listen on.
            token: token required of clients; empty: none.

        Returns:
            The base URL.

        Raises:
            UserError: the server ended or was not ready in time; the message includes the log's last line.
        """
        if self._process is not None:
            raise RuntimeError("the embedded fleet runs already")
        self._launch = _Launch(config, log_path, python, seed, environment, host, token)
        self._reserved = _reserve(host)
        self.url = f"http://{host}:{self._port}"
        try:
            self._run(instead_of=None)
        except UserError:
            self.stop()
            self._reserved.close()
            raise
        threading.Thread(target=self._probe, args=(host, self._port), daemon=True).start()
        return self.url

    def restart(self) -> None:
        """Restart the server on the same port, with a new verifier host.

        May be called in a thread; `stop` ends it early.

        Raises:
            UserError: as for `start`; it may be called again.
        """
        process = self._process
        if process is None:
            raise UserError(STOPPED)
        self._run(instead_of=process)

    def ended(self) -> str | None:
        """Return why the server no longer serves; ``None`` while its process lives and answers."""
        process = self._process
        if process is None:
            return None
        if process.poll() is not None:
            return f"its process ended with status {process.returncode}"
        return f"it gave no answer for {HUNG_S:g} s" if process is self._hung else None

    @property
    def pid(self) -> int | None:
        """Process id of the server; ``None`` unless started."""
        return None if self._process is None else self._process.pid

    def stop(self) -> None:
        """Stop the server. Idempotent."""
        self._stopped.set()
        with self._changing:
            process, self._process = self._process, None
        if process is None:
            return
        self._reserved.close()
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    @property
    def _port(self) -> int:
        return int(self._reserved.getsockname()[1])

    def _probe(self, host: str, port: int) -> None:
        """Find out whether the server hangs, until it is stopped."""
        while not self._stopped.wait(PROBE_INTERVAL_S):
            process = self._process
            connection = http.client.HTTPConnection(host, port, timeout=HUNG_S)
            try:
                connection.request("GET", "/health")
                connection.getresponse()
            except TimeoutError:
                self._hung = process
            except (OSError, http.client.HTTPException):
                pass  # it starts, or has ended
            finally:
                connection.close()

    def _run(self, instead_of: subprocess.Popen[bytes] | None) -> None:
        """Start a process and wait until it listens."""
        with tempfile.TemporaryDirectory(prefix="fleet-") as folder:
            ready = Path(folder) / "ready.json"
            with self._changing:
                if self._process is not instead_of:
                    raise UserError(STOPPED)
                if instead_of is not None:
                    instead_of.kill()
                    instead_of.wait()
                process = self._process = self._popen(ready)
            deadline = time.monotonic() + self._launch.config.start_timeout_s
            while not ready.exists():
                if process.poll() is not None:
                    failure = self._failure(f"ended with status {process.returncode}")
                    raise ServerKilled(str(failure)) if process.returncode < 0 else failure
                if time.monotonic() > deadline:
                    process.kill()
                    limit = f"{self._launch.config.start_timeout_s:g} s (env.start_timeout_s)"
                    raise self._failure(f"was not ready in {limit}")
                time.sleep(POLL_S)

    def _popen(self, ready: Path) -> subprocess.Popen[bytes]:
        launch = self._launch
        command = [str(launch.python or sys.executable), "-m", "megatron_fleet.embedded_fleet.server"]
        command += [
            "--host",
            launch.host,
            "--port",
            str(self._port),
            "--ready-file",
            str(ready),
            "--parent",
            str(os.getpid()),
            "--sandbox",
            launch.config.sandbox,
        ]
        if launch.config.faults != FaultRatesConfig():
            command += ["--faults", launch.config.faults.model_dump_json(), "--seed", str(launch.seed)]
        inherited = os.environ if launch.environment is None else launch.environment
        environment = without_secrets(inherited) | {TOKEN: launch.token}
        launch.log.parent.mkdir(parents=True, exist_ok=True)
        with launch.log.open("ab") as log:
            try:
                return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)
            except OSError as error:
                raise UserError(f"Cannot start the episode environment's Python: {error}") from error

    def _failure(self, what: str) -> UserError:
        last = ""
        with contextlib.suppress(OSError, IndexError):
            last = self._launch.log.read_text(errors="replace").strip().splitlines()[-1]
        return UserError(f"The embedded fleet's server {what}; see {self._launch.log}. Last line: {last or 'none'}")


def _reserve(host: str) -> socket.socket:
    """Bind a free port without listening on it.

    While the socket is open, only this user's processes that set SO_REUSEPORT, as the server does, can bind the port:
    nobody else gets it during a restart.
    """
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        reserved.bind((host, 0))
    except OSError as error:
        reserved.close()
        raise UserError(f"The embedded fleet's server cannot listen on {host}: {error.strerror}") from error
    return reserved

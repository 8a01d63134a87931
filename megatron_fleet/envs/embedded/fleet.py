"""EmbeddedFleet: starts and stops the embedded fleet's server as a child process."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from megatron_fleet.config.errors import UserError
from megatron_fleet.config.schema import Env
from megatron_fleet.config.sections.faults import FaultRates

POLL_S = 0.02
STOP_S = 5.0


class EmbeddedFleet:
    """One server process, owned by whoever started it; it also ends by itself when this process does."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, config: Env, log_path: Path, python: str | Path | None = None, seed: int = 0) -> str:
        """Start the server and wait until it listens.

        Args:
            config: its ``start_timeout_s`` is the deadline, its ``faults`` happen.
            log_path: the server's output is appended there.
            python: interpreter of the episode environment; this process's own by default.
            seed: decides the faults.

        Returns:
            The base URL.

        Raises:
            UserError: the server ended or was not ready in time; tells the log's last line.
        """
        if self._process is not None:
            raise RuntimeError("the embedded fleet runs already")
        with tempfile.TemporaryDirectory(prefix="fleet-") as folder:
            ready = Path(folder) / "ready.json"
            command = [str(python or sys.executable), "-m", "megatron_fleet.envs.embedded.server"]
            command += ["--ready-file", str(ready), "--parent", str(os.getpid())]
            if config.faults != FaultRates():
                command += ["--faults", config.faults.model_dump_json(), "--seed", str(seed)]
            log_path.parent.mkdir(parents=True, exist_ok=True)
            with log_path.open("ab") as log:
                try:
                    self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
                except OSError as error:
                    raise UserError(f"Cannot start the episode environment's Python: {error}") from error
            deadline = time.monotonic() + config.start_timeout_s
            while not ready.exists():
                if self._process.poll() is not None:
                    self._fail(f"ended with status {self._process.returncode}", log_path)
                if time.monotonic() > deadline:
                    self._fail(f"was not ready in {config.start_timeout_s:g} s (env.start_timeout_s)", log_path)
                time.sleep(POLL_S)
            return f"http://127.0.0.1:{json.loads(ready.read_text())['port']}"

    @property
    def pid(self) -> int | None:
        """Process id while started."""
        return None if self._process is None else self._process.pid

    def stop(self) -> None:
        """End the server. Idempotent."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _fail(self, what: str, log_path: Path) -> None:
        self.stop()
        last = ""
        with contextlib.suppress(OSError, IndexError):
            last = log_path.read_text(errors="replace").strip().splitlines()[-1]
        raise UserError(f"The embedded fleet's server {what}; see {log_path}. Last line: {last or 'none'}")

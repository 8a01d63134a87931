"""Supervisor of jobs on this machine: ``python -m megatron_fleet.launch.supervisor FOLDER`` runs the commands
of ``FOLDER/commands.json`` one after the other and writes ``FOLDER/ended.json``.

A command that ends with status 75 has saved before its end, as for ``run.time_limit_s``, and is started again with
``run.resume=must``. The environment is the one that the launcher has chosen. SIGTERM is passed on, and ends the job.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import FrameType

from megatron_fleet.storage.local import write_atomically

COMMANDS = "commands.json"
ENDED = "ended.json"


class Supervisor:
    """Runs commands until they have ended for good."""

    def __init__(self, max_requeues: int) -> None:
        self._max_requeues = max_requeues
        self._child: subprocess.Popen[bytes] | None = None
        self._stopped = False

    def stop(self, number: int, _frame: FrameType | None) -> None:
        """Pass a signal on, and start nothing any more."""
        self._stopped = True
        if self._child is not None and self._child.poll() is None:
            self._child.send_signal(number)

    def run(self, command: list[str]) -> int:
        """Run one command, and again as long as it asks for it; returns its last status."""
        status, attempts = os.EX_TEMPFAIL, 0
        while status == os.EX_TEMPFAIL and attempts <= self._max_requeues and not self._stopped:
            again = ["run.resume=must"] if attempts else []
            self._child = subprocess.Popen([*command, *again], env=dict(os.environ), stdin=subprocess.DEVNULL)
            status = self._child.wait()
            attempts += 1
        return status if status >= 0 else 128 - status

    def run_all(self, commands: list[list[str]]) -> int:
        """Run the commands; a failed one does not keep the next from starting. Returns the first bad status."""
        statuses = []
        for command in commands:
            if not self._stopped:
                statuses.append(self.run(command))
        return next(filter(None, statuses), 0)


def main(folder: Path) -> int:
    """Run a job's commands; returns its status."""
    said = json.loads((folder / COMMANDS).read_text(encoding="utf-8"))
    supervisor = Supervisor(said["max_requeues"])
    signal.signal(signal.SIGTERM, supervisor.stop)
    status = supervisor.run_all(said["commands"])
    write_atomically(folder / ENDED, json.dumps({"status": status}).encode())
    return status


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))

"""Jobs on this machine, in the background: `mfleet train`, or launch/torchrun/train.sh for ranks under torchrun."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from megatron_fleet.config.errors import UserError
from megatron_fleet.config.files import read_object
from megatron_fleet.launch.job import FOLLOW_S, RECORD, SCRIPTS, Job, Record, Rendered, State, Tail, read_record
from megatron_fleet.launch.supervisor import COMMANDS, ENDED

LOG = "job.log"


class Local:
    """See `job.Launcher`. The runs of a sweep follow one another."""

    kind = "local"

    def check(self, job: Job) -> None:
        """Refuse several hosts."""
        if job.hosts > 1:
            raise UserError(
                f"cluster.nodes={job.hosts}: cluster={self.kind} starts everything on this machine; choose "
                f"cluster=slurm, skypilot or kubernetes, or start the hosts by hand (docs/run/cluster.md)."
            )

    def program(self) -> list[str]:
        """Return the command that trains, without overrides."""
        return [sys.executable, "-m", "megatron_fleet.cli", "train"]

    def render(self, job: Job) -> Rendered:
        """Return the list of commands and the command of their supervisor."""
        commands = [[*self.program(), *run.overrides] for run in job.runs]
        plain = {"max_requeues": job.config.launch.max_requeues, "commands": commands}
        supervisor = (sys.executable, "-m", "megatron_fleet.launch.supervisor", str(job.folder))
        return Rendered({COMMANDS: json.dumps(plain, indent=2) + "\n"}, (supervisor,))

    def submit(self, job: Job, rendered: Rendered) -> Record:
        """Start the supervisor in a session of its own."""
        if (job.folder / RECORD).exists() and (process := _process(read_record(job.folder))) is not None:
            raise UserError(f"{job.folder}: its job still runs (process {process.pid}); follow or cancel it.")
        (job.folder / ENDED).unlink(missing_ok=True)
        with (job.folder / LOG).open("wb") as log:
            process = subprocess.Popen(
                rendered.commands[0],
                env=dict(job.environ) | {"PYTHONUNBUFFERED": "1", "MFLEET_BIN": str(Path(sys.executable).parent)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        # A process id alone may be another process's by the time it is asked for.
        started = str(psutil.Process(process.pid).create_time())
        outs = [str(run.out) for run in job.runs]
        return Record(self.kind, job.name, [str(process.pid)], outs, job.commit, detail={"started": started})

    def follow(self, record: Record, folder: Path) -> State:
        """Print the log until the supervisor has ended."""
        tail = Tail([folder / LOG])
        while (process := _process(record)) is not None:
            tail.show()
            time.sleep(FOLLOW_S if process.status() != psutil.STATUS_ZOMBIE else 0)
        tail.show()
        if not (folder / ENDED).exists():
            return State("killed", 128 + signal.SIGKILL)
        status = int(read_object(folder / ENDED, "look at the log")["status"])
        return State("completed" if status == 0 else "failed", status)

    def cancel(self, record: Record, folder: Path) -> None:
        """Ask the run to save and end."""
        if (process := _process(record)) is None:
            raise UserError(f"{folder}: its job has ended already.")
        process.terminate()


class Torchrun(Local):
    """See `Local`."""

    kind = "torchrun"

    def program(self) -> list[str]:
        return [str(SCRIPTS / "torchrun" / "train.sh")]


def _process(record: Record) -> psutil.Process | None:
    """Return the supervisor while it runs."""
    try:
        process = psutil.Process(int(record.ids[0]))
        alive = process.status() != psutil.STATUS_ZOMBIE and str(process.create_time()) == record.detail["started"]
        return process if alive else None
    except psutil.NoSuchProcess:
        return None

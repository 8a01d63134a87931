"""A job to launch, its state once it is submitted, and the interface of launchers."""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from megatron_fleet.config.errors import UserError, say, say_lines
from megatron_fleet.config.files import read_object
from megatron_fleet.config.schema import Config
from megatron_fleet.storage.local import make_folders, write_atomically

ROOT = Path(__file__).resolve().parents[2]
"""The project's folder."""
SCRIPTS = ROOT / "launch"
RECORD = "job.json"
COMMAND_S = 300.0
"""Deadline of a scheduler's command; SkyPilot's takes minutes when it starts its server."""
FOLLOW_S = 2.0
OUTAGE_S = 300.0
"""How long `--follow` retries while the scheduler does not answer, as when it restarts. The job itself continues."""
TOKEN = "MFLEET_TOKEN"
"""Variable with the secret of the sockets of a run on several hosts."""
IMAGE_PROJECT = "/megatron_fleet"
"""Folder of the project in an image of its Dockerfile."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a job.

    Attributes:
        overrides: arguments of ``mfleet train``.
        out: its folder, ``run.out``.
        id: its id, fixed before it starts, so that every attempt is an attempt at the same run.
    """

    overrides: tuple[str, ...]
    out: Path
    id: str


@dataclass(frozen=True, slots=True)
class Job:
    """One run, or the runs of a sweep, to be launched alike.

    Attributes:
        config: configuration of the first run; the section `launch` is the same for all.
        folder: rendered files, log and record of the job on this machine.
        environ: environment of the scheduler's commands, with the secrets that the job needs and no others.
        variables: names of variables in ``environ`` that the job gets although they are no secrets.
        secrets: names of variables in ``environ`` that hold the job's secrets.
        commit: commit of the project's files; ``None``: they are no checkout, or differ from it.
    """

    name: str
    config: Config
    runs: tuple[Run, ...]
    folder: Path
    environ: Mapping[str, str]
    variables: tuple[str, ...]
    secrets: tuple[str, ...]
    commit: str | None

    @property
    def hosts(self) -> int:
        """Hosts with ranks."""
        return hosts_of(self.config)


def hosts_of(config: Config) -> int:
    """Return the number of hosts that a run asks for: ``cluster.nodes``, where 0 is one alone."""
    return max(config.cluster.nodes, 1)


def host_variables(config: Config) -> dict[str, str]:
    """Return the variables of launch/install.sh and of what comes before the run on a host."""
    launch, variables = config.launch, {}
    if launch.doctor:
        variables["MFLEET_DOCTOR"] = "1"
    if launch.install:
        variables["INSTALL_TIMEOUT_S"] = str(launch.install_timeout_s)
        if config.env.about.hosted and config.env.fleet.package:
            variables["FLEET_PACKAGE"] = config.env.fleet.package
    return variables


@dataclass(frozen=True, slots=True)
class Rendered:
    """Files and commands of a submission.

    Attributes:
        files: text by name, written to the job's folder; no secrets.
        commands: one for each submission; a file of the job's folder is its whole path.
        stdin: by command, text for its standard input, which may have secrets and is not kept.
        notes: what the user would not expect, such as what is left out, and why.
    """

    files: dict[str, str]
    commands: tuple[tuple[str, ...], ...]
    stdin: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class State:
    """State of a submitted job.

    Attributes:
        words: as the scheduler says it.
        status: exit status once it has ended for good; ``None``: it has not.
    """

    words: str
    status: int | None = None


@dataclass(frozen=True, slots=True)
class Record:
    """A submitted job, as ``<folder>/job.json`` has it.

    Attributes:
        ids: the scheduler's names of it, one for each submission.
        outs: folders of its runs.
        detail: what the launcher needs besides, such as a namespace.
    """

    kind: str
    name: str
    ids: list[str]
    outs: list[str]
    commit: str | None = None
    submitted_at: float = 0.0
    detail: dict[str, str] = field(default_factory=dict)


class Launcher(Protocol):
    """One kind of job."""

    def check(self, job: Job) -> None:
        """Raise UserError for a job that this kind cannot run."""
        ...

    def render(self, job: Job) -> Rendered:
        """Return what would be submitted; writes nothing."""
        ...

    def submit(self, job: Job, rendered: Rendered) -> Record:
        """Submit what is in the job's folder.

        Raises:
            UserError: the scheduler refuses it, or its commands are missing.
        """
        ...

    def follow(self, record: Record, folder: Path) -> State:
        """Print the job's log until it has ended for good."""
        ...

    def cancel(self, record: Record, folder: Path) -> None:
        """End the job for good; what it has saved stays."""
        ...


def new_token() -> str:
    """Return a secret for the sockets of one run on several hosts."""
    return secrets.token_hex(32)


def remote_out(run: Run) -> str:
    """Return ``run.out`` as hosts without this disk see it: relative ones are below the project's folder there."""
    here = Path.cwd()
    return str(run.out.relative_to(here) if run.out.is_relative_to(here) else run.out)


def as_yaml(tree: dict[str, Any]) -> str:
    """Return a manifest as YAML, texts of several lines as blocks."""
    import yaml

    class Dumper(yaml.SafeDumper):
        """Writes texts of several lines as blocks, and what occurs twice twice, without a reference."""

        def ignore_aliases(self, data: Any) -> bool:
            """Write no references."""
            return True

    def represent(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
        # Readers take these in a block or a bare text for line ends, which they may change.
        other_ends = any(end in text for end in "\r\x85\u2028\u2029")
        style = '"' if other_ends else "|" if "\n" in text else None
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)

    Dumper.add_representer(str, represent)
    return "---\n" + yaml.dump(tree, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=120)


def write_files(job: Job, rendered: Rendered) -> None:
    """Write the rendered files into the job's folder."""
    make_folders(job.folder)
    for name, text in rendered.files.items():
        write_atomically(job.folder / name, text.encode())


def write_record(folder: Path, record: Record) -> None:
    """Write a job's record."""
    plain = asdict(record) | {"submitted_at": time.time()}
    write_atomically(folder / RECORD, (json.dumps(plain, indent=2) + "\n").encode())


def read_record(folder: Path) -> Record:
    """Read a job's record. Raises UserError when there is none, or it is damaged."""
    remedy = "give the run.out of a run that `mfleet launch` submitted from this machine"
    tree = read_object(folder / RECORD, remedy)
    try:
        return Record(**tree)
    except TypeError:
        raise UserError(f"{folder / RECORD} is not the record of a job; {remedy}.") from None


def execute(
    command: Sequence[str | Path], environ: Mapping[str, str], stdin: str = "", timeout_s: float = COMMAND_S
) -> str:
    """Run a scheduler's command; returns what it printed.

    Raises:
        UserError: it is not installed, fails, or has not answered within ``timeout_s``.
    """
    words = [str(word) for word in command]
    try:
        done = subprocess.run(
            words,
            env=dict(environ),
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except FileNotFoundError:
        raise UserError(f"{words[0]} is not installed here; launch from a machine that has it.") from None
    except subprocess.TimeoutExpired:
        raise UserError(f"`{words[0]} {words[1]}` has not answered within {timeout_s:.0f} s; try again.") from None
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip() or "it said nothing").splitlines()[-1]
        raise UserError(f"`{words[0]} {words[1]}` failed with status {done.returncode}: {said}")
    return done.stdout


def later_state(ask: Callable[[], State]) -> State:
    """Query the state of a job that is known to exist; retry while the scheduler does not answer.

    Raises:
        UserError: no answer within ``OUTAGE_S``.
    """
    end, warned = time.monotonic() + OUTAGE_S, False
    while True:
        try:
            return ask()
        except UserError as error:
            if time.monotonic() > end:
                raise
            if not warned:
                say(f"mfleet: cannot query the job's state, retrying: {error}", sys.stderr)
                warned = True
        time.sleep(FOLLOW_S)


class Tail:
    """Prints what is added to log files."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._read = dict.fromkeys(files, 0)

    def show(self) -> None:
        """Print whole lines that are new."""
        for file, position in self._read.items():
            try:
                with file.open("rb") as opened:
                    opened.seek(position)
                    new = opened.read()
            except FileNotFoundError:
                continue
            whole = new[: new.rfind(b"\n") + 1]
            self._read[file] += len(whole)
            if whole:
                say_lines(whole.decode(errors="replace").rstrip("\n"), sys.stdout)

"""Jobs of a Slurm cluster: ``launch/slurm/train.sbatch`` with the options that the section `launch` asks for.

A sweep is one array job. The script requeues a run that has saved before its end; Slurm requeues a job that has lost a
host. Neither restarts a run that has ended for good.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from megatron_fleet.config import validate
from megatron_fleet.config.errors import UserError, say
from megatron_fleet.config.load import load
from megatron_fleet.launch.job import (
    FOLLOW_S,
    IMAGE_PROJECT,
    ROOT,
    SCRIPTS,
    Job,
    Record,
    Rendered,
    State,
    Tail,
    execute,
    host_variables,
    later_state,
)

SCRIPT = "job.sbatch"
_PLAIN = re.compile(r"[\w%+,./:=@~-]+", re.ASCII)
"""Values of options that need no quotes."""
_GPUS = ("gpus", "gpus-per-node", "gpus-per-task", "gpus-per-socket")
_GENERIC = ("gres", "tres-per-node", "tres-per-task", "tres-per-job")
"""Options of sbatch that request GPUs, and those that request any generic resources."""
_OVER = (
    "COMPLETED",
    "CANCELLED",
    "FAILED",
    "TIMEOUT",
    "NODE_FAIL",
    "PREEMPTED",
    "BOOT_FAIL",
    "DEADLINE",
    "OUT_OF_MEMORY",
)


class Slurm:
    """See `job.Launcher`."""

    def check(self, job: Job) -> None:
        """Check heterogeneous and shrinking jobs, and the layouts of the latter."""
        launch = job.config.launch
        if launch.slurm.rollout_hosts and job.config.rollout.engine.colocated:
            raise UserError(
                f"launch.slurm.rollout_hosts={launch.slurm.rollout_hosts} adds hosts without ranks, and colocated "
                f"engines need ranks; set rollout.engine.colocated=false."
            )
        if launch.slurm.rollout_hosts and len(job.runs) > 1:
            raise UserError("launch.slurm.rollout_hosts: Slurm has no arrays of such jobs; launch the runs one by one.")
        if not launch.shared_disk and not launch.image and not launch.install:
            raise UserError(
                "launch.shared_disk=false: the hosts' environments come from launch.image, or from launch.install=true "
                "in the project's folder on each host; set one of them."
            )
        for key, options in (("options", launch.slurm.options), ("rollout_options", launch.slurm.rollout_options)):
            for name in options:
                if not re.fullmatch(r"[a-z][a-z0-9-]+", name):
                    raise UserError(
                        f"launch.slurm.{key}: {name!r} is not a long option name of sbatch; write it without dashes "
                        f"in front, as {{reservation: NAME}}."
                    )
        if "\\" in str(job.folder):
            raise UserError(f"run.out={job.config.run.out}: Slurm drops a backslash in a path; choose another folder.")
        for folder in launch.slurm.mounts:
            if "," in folder:
                raise UserError(f"launch.slurm.mounts: {folder!r} has a comma; give each folder as an item of its own.")
        for run in job.runs:
            _fewer_hosts(run.overrides, job.hosts, launch.min_hosts)

    def render(self, job: Job) -> Rendered:
        """Return the script with its options, and sbatch's command line."""
        text = (SCRIPTS / "slurm" / "train.sbatch").read_text(encoding="utf-8")
        first, rest = text.split("\n", 1)
        overrides = [text for run in job.runs for text in ("--next", *run.overrides)][1:]
        variables = _variables(job)
        # In the script and not in the environment, where a shell that launches two jobs would mix them up.
        lines = [first, *_options(job), *(f"export {name}={shlex.quote(value)}" for name, value in variables.items())]
        path = str(job.folder / SCRIPT)
        return Rendered({SCRIPT: _with_head(lines, rest)}, (("sbatch", "--parsable", path, *overrides),))

    def submit(self, job: Job, rendered: Rendered) -> Record:
        """Ask sbatch whether the cluster can run it, then submit it."""
        command = rendered.commands[0]
        for log in job.folder.glob("job*.log"):
            log.unlink()
        execute(["sbatch", "--test-only", *command[1:]], job.environ)
        answer = execute(command, job.environ).strip()
        id_ = answer.partition(";")[0]
        if not id_.isdigit():
            raise UserError(f"sbatch answered {answer[:100]!r} without a job number; look with squeue.")
        return Record("slurm", job.name, [id_], [str(run.out) for run in job.runs], job.commit)

    def follow(self, record: Record, folder: Path) -> State:
        """Print the log, and the states that the job passes through."""
        (id_,) = record.ids
        names = [f"job-{index}.log" for index in range(len(record.outs))] if len(record.outs) > 1 else ["job.log"]
        tail, last = Tail([folder / name for name in names]), ""
        state = _state(id_)
        while True:
            tail.show()
            if state.words != last:
                say(f"mfleet: Slurm job {id_}: {state.words}", sys.stderr)
                last = state.words
            if state.status is not None:
                tail.show()
                return state
            time.sleep(FOLLOW_S)
            state = later_state(lambda: _state(id_))

    def cancel(self, record: Record, folder: Path) -> None:
        """End the job by scancel."""
        execute(["scancel", *record.ids], os.environ)


def quoted(value: str) -> str:
    """Quote a value as sbatch reads its options: a backslash escapes within quotes of both kinds."""
    return value if _PLAIN.fullmatch(value) else '"' + re.sub(r'([\\"])', r"\\\1", value) + '"'


def _with_head(head: list[str], rest: str) -> str:
    """Put options and variables before the first command, after which sbatch heeds no options; they replace equal ones
    of the script."""
    comments, body = [], rest.split("\n")
    while body[0].startswith("#"):
        comments.append(body.pop(0))
    options = [line for line in head[1:] if line.startswith("#SBATCH")]
    exports = [line for line in head[1:] if not line.startswith("#SBATCH")]
    given = {_name(line) for line in options}
    kept = [line for line in comments if not line.startswith("#SBATCH") or _name(line) not in given]
    return "\n".join([head[0], *kept, *options, *exports, *body])


def _name(line: str) -> str:
    return re.split(r"[= ]", line.removeprefix("#SBATCH").strip())[0]


def _options(job: Job) -> Iterator[str]:
    """Yield the lines of options; those of a second component last, after ``hetjob``."""
    launch, slurm, world = job.config.launch, job.config.launch.slurm, job.config.parallel.world_size
    fewest, ranks = launch.min_hosts or job.hosts, world // job.hosts
    swept, elastic = len(job.runs) > 1, fewest < job.hosts
    ours = {
        "job-name": re.sub(r"[^\w.-]", "-", job.name),
        "nodes": f"{fewest}-{job.hosts}" if elastic else str(job.hosts),
        # With --ntasks-per-node, Slurm allocates only the minimum of a range of nodes.
        "ntasks-per-node": None if elastic else str(ranks),
        "cpus-per-task": str(ranks) if elastic and not slurm.exclusive else None,
        "gpus-per-node": str(launch.gpus) if launch.gpus and not _asks_for_gpus(slurm.options) else None,
        "time": slurm.time,
        "signal": f"B:USR1@{slurm.signal_s}",
        "output": str(job.folder).replace("%", "%%") + ("/job-%a.log" if swept else "/job.log"),
        "partition": slurm.partition,
        "account": slurm.account,
        "qos": slurm.qos,
        "constraint": slurm.constraint,
        "array": f"0-{len(job.runs) - 1}{f'%{slurm.parallel}' if slurm.parallel else ''}" if swept else None,
    }
    yield from _lines(ours, slurm.options, slurm.exclusive)
    if slurm.rollout_hosts:
        yield "#SBATCH hetjob"
        ours = {"nodes": str(slurm.rollout_hosts), "ntasks-per-node": "1", "time": slurm.time}
        yield from _lines(ours, slurm.rollout_options, slurm.exclusive)


def _asks_for_gpus(options: Mapping[str, str]) -> bool:
    """Return whether options request GPUs, by a name of their own or as a generic resource."""
    return any(
        name in _GPUS or (name in _GENERIC and re.search(r"\bgpu\b", value) is not None)
        for name, value in options.items()
    )


def _lines(ours: Mapping[str, str | None], options: Mapping[str, str], exclusive: bool) -> list[str]:
    """Return the lines of one component: our options, unless the user's replace them or leave them out by an empty
    value, then the user's."""
    kept = {name: value for name, value in ours.items() if value is not None and name not in options}
    flags = {"exclusive": ""} if exclusive and "exclusive" not in options else {}
    given = {name: value for name, value in options.items() if value or name not in ours}
    return [
        f"#SBATCH --{name}={quoted(value)}" if value else f"#SBATCH --{name}"
        for name, value in (kept | flags | given).items()
    ]


def _variables(job: Job) -> Mapping[str, str]:
    launch = job.config.launch
    variables = {"MFLEET_MAX_REQUEUES": str(launch.max_requeues), "MFLEET_HOSTS": str(job.hosts)}
    variables |= host_variables(job.config)
    variables["MFLEET_PROJECT"] = IMAGE_PROJECT if launch.image else str(ROOT)
    if launch.image:
        variables |= {"MFLEET_IMAGE": launch.image, "MFLEET_CONTAINER": launch.slurm.container}
        variables["MFLEET_MOUNTS"] = ",".join(launch.slurm.mounts)
    elif launch.install:
        variables["MFLEET_INSTALL"] = "shared" if launch.shared_disk else "each"
    if not launch.shared_disk and not launch.image:
        variables["MFLEET_OUT"] = str(job.runs[0].out)
    fewer = _fewer_hosts(job.runs[0].overrides, job.hosts, launch.min_hosts)
    if fewer:
        variables["MFLEET_RANKS_PER_HOST"] = str(job.config.parallel.world_size // job.hosts)
    for hosts, changed in fewer.items():
        variables[f"MFLEET_WITH_{hosts}_HOSTS"] = " ".join(changed)
    return variables | {name: job.environ[name] for name in job.variables}


def _fewer_hosts(overrides: tuple[str, ...], hosts: int, fewest: int | None) -> dict[int, list[str]]:
    """Return the overrides for each smaller number of hosts.

    Raises:
        UserError: with one of these the run would not be possible.
    """
    if fewest is None or fewest >= hosts:
        return {}
    config, found = load(list(overrides)), {}
    for count in range(fewest, hosts):
        shares = {"parallel.data": config.parallel.data}
        if config.rollout.engine.replicas != "auto":
            shares["rollout.engine.replicas"] = config.rollout.engine.replicas
        changed = []
        for key, value in shares.items():
            if value * count % hosts:
                raise UserError(
                    f"launch.min_hosts={fewest}: {key}={value} on {hosts} hosts is not a whole number on {count}; "
                    f"raise launch.min_hosts, or change it."
                )
            changed.append(f"{key}={value * count // hosts}")
        try:
            validate.check(load([*overrides, *changed]))
        except UserError as error:
            raise UserError(f"launch.min_hosts={fewest}: with {count} hosts, {error}") from None
        found[count] = changed
    return found


def _state(id_: str) -> State:
    """Ask for the state of a job, or of all tasks of an array: ended when all have."""
    said = execute(["squeue", "--noheader", f"--job={id_}", "--states=all", "--format=%T"], os.environ).split()
    going = sorted(set(said) - set(_OVER))
    if going:
        return State(", ".join(going).lower())
    return _ended(id_, said)


def _ended(id_: str, states: list[str]) -> State:
    shown = execute(["scontrol", "show", "job", id_, "--oneliner"], os.environ)
    statuses = [int(status) or int(number) for status, number in re.findall(r" ExitCode=(\d+):(\d+)", shown)]
    bad = next((state for state in states if state != "COMPLETED"), None)
    if bad is None:
        return State("completed", 0)
    return State(bad.lower(), next((status for status in statuses if status), 1))

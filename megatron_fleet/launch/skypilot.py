"""Managed jobs of SkyPilot: ``launch/skypilot/train.yaml`` with places, hosts, arguments and secrets filled in.

The runs of a sweep are jobs of their own. SkyPilot's command, `sky`, lives in an environment of its own (its
dependencies contradict ours) and is only called.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_fleet.config.errors import UserError
from megatron_fleet.config.schema import Config, LaunchConfig
from megatron_fleet.config.secrets import without_secrets
from megatron_fleet.launch.job import (
    FOLLOW_S,
    IMAGE_PROJECT,
    ROOT,
    SCRIPTS,
    TOKEN,
    Job,
    Record,
    Rendered,
    Run,
    State,
    as_yaml,
    execute,
    host_variables,
    new_token,
    remote_out,
)
from megatron_fleet.planning.hardware import GPUS
from megatron_fleet.planning.plan import problem_on

SUBMIT_S = 3600.0
"""Deadline of a submission, which may start the host of SkyPilot's controller first."""
_SUCCEEDED, _UNFINISHED = 0, 101
"""Exit statuses of ``sky jobs logs``."""
ACCELERATORS = ("H100", "H200", "B200")
"""GPUs that are asked for unless configured otherwise, after ``cluster.gpu``."""
NO_SEVERAL_HOSTS = ("runpod", "vast", "primeintellect")
"""Places whose hosts SkyPilot 0.14 does not join into one job."""
NO_IMAGES = ("primeintellect", "slurm")
"""Places where it takes no container images (on Slurm only with a plugin), and refuses the whole job for them."""


class SkyPilot:
    """See `job.Launcher`."""

    def check(self, job: Job) -> None:
        """Check places, and that what is sent is a commit."""
        launch, sky = job.config.launch, job.config.launch.skypilot
        if launch.shared_disk:
            raise UserError("launch.shared_disk=true: SkyPilot's hosts share no disk with this one; set it to false.")
        if isinstance(job.config.run.resume, int):
            raise UserError(
                f"run.resume={job.config.run.resume}: each recovery of the job would go back to that step; set it to "
                f"auto or must."
            )
        if (launch.image is None) != launch.install:
            raise UserError(
                f"launch.install={str(launch.install).lower()} launch.image={launch.image or 'null'}: the hosts' "
                f"environments come from one of them; set launch.image, or launch.install=true."
            )
        for key, named in (("spot", sky.spot), ("images", sky.images)):
            if unknown := [place for place in named if place not in sky.infra]:
                raise UserError(
                    f"launch.skypilot.{key} names {unknown[0]}, which launch.skypilot.infra does not; add it there."
                )
        if not _places(launch, job.hosts):
            raise UserError(
                f"launch.skypilot.infra: none of {', '.join(sky.infra)} joins cluster.nodes={job.hosts} hosts into "
                f"one job, from launch.image={launch.image or 'null'}; add another, such as kubernetes."
            )
        problems, kinds = _problems(job.config), _kinds(job.config)
        if launch.gpus and len(problems) == len(kinds):
            *_, (kind, problem) = problems.items()
            raise UserError(
                f"launch.skypilot.accelerators={', '.join(kinds)}: the run fits into none of them; add "
                f"another, or change the run (mfleet plan --gpu {kind}). {kind}: {problem}"
            )
        if launch.image is None and job.commit is None:
            raise UserError(f"{ROOT} has uncommitted changes (git status), which the job would run with; commit them.")

    def render(self, job: Job) -> Rendered:
        """Return one task for each run, and the commands that submit them."""
        files, commands = {}, []
        for index, run in enumerate(job.runs):
            name = f"job-{index}.yaml" if len(job.runs) > 1 else "job.yaml"
            files[name] = as_yaml(_task(job, run))
            secrets = [word for secret in (*job.secrets, TOKEN) for word in ("--secret", secret)]
            path = str(job.folder / name)
            commands.append(("sky", "jobs", "launch", "--yes", "--detach-run", *secrets, path))
        left_out = (
            f"{kind} is left out of launch.skypilot.accelerators: {problem}"
            for kind, problem in _problems(job.config).items()
        )
        return Rendered(files, tuple(commands), notes=tuple(left_out))

    def submit(self, job: Job, rendered: Rendered) -> Record:
        """Submit all runs; their secrets go through the environment of the command."""
        for command in rendered.commands:
            execute(command, {**job.environ, TOKEN: new_token()}, timeout_s=SUBMIT_S)
        names = [task_name(run) for run in job.runs]
        return Record("skypilot", job.name, names, [str(run.out) for run in job.runs], job.commit)

    def follow(self, record: Record, folder: Path) -> State:
        """Print the logs of the jobs, one after the other, until each has ended."""
        worst = State("completed", 0)
        for name in record.ids:
            status = _UNFINISHED
            while status == _UNFINISHED:
                status = subprocess.run(
                    ["sky", "jobs", "logs", "--follow", "--name", name], env=without_secrets(os.environ), check=False
                ).returncode
                time.sleep(FOLLOW_S if status == _UNFINISHED else 0)
            if status != _SUCCEEDED:
                worst = State(f"failed (sky jobs logs --name {name})", 1)
        return worst

    def cancel(self, record: Record, folder: Path) -> None:
        """Cancel the jobs, whose hosts then end."""
        for name in record.ids:
            execute(["sky", "jobs", "cancel", "--yes", "--name", name], without_secrets(os.environ))


def task_name(run: Run) -> str:
    """Return the name of a run's job, which begins with a letter."""
    return re.sub(r"[^A-Za-z0-9-]+", "-", run.id if run.id[0].isalpha() else f"run-{run.id}").strip("-")


def _places(launch: LaunchConfig, hosts: int) -> list[str]:
    """Return the places that can run a job of so many hosts, from its image if it has one."""
    left_out = (*(NO_SEVERAL_HOSTS if hosts > 1 else ()), *(NO_IMAGES if launch.image else ()))
    return [place for place in launch.skypilot.infra if place.partition("/")[0] not in left_out]


def _task(job: Job, run: Run) -> dict[str, Any]:
    import yaml

    launch = job.config.launch
    text = (SCRIPTS / "skypilot" / "train.yaml").read_text(encoding="utf-8")
    task: dict[str, Any] = yaml.safe_load(text)
    common = {key: value for key, value in task["resources"].items() if key != "accelerators"}
    arguments = shlex.join(run.overrides)
    environment = {"MFLEET_ARGUMENTS": arguments, **host_variables(job.config)}
    environment["MFLEET_OUT"] = remote_out(run)
    if launch.image is None:
        task["workdir"] = str(ROOT)
    else:
        environment["MFLEET_PROJECT"] = IMAGE_PROJECT
        del task["workdir"], task["setup"]
    return task | {
        "name": task_name(run),
        "num_nodes": job.hosts,
        "resources": {**common, "disk_size": launch.skypilot.disk_gb, "ordered": _ordered(job.config, job.hosts)},
        "envs": environment | {name: job.environ[name] for name in job.variables},
        "secrets": dict.fromkeys((*job.secrets, TOKEN)),
    }


def _kinds(config: Config) -> tuple[str, ...]:
    """Return the accelerators that each place is asked for, in this order."""
    named = config.launch.skypilot.accelerators
    return named or tuple(dict.fromkeys([*filter(None, [config.cluster.gpu]), *ACCELERATORS]))


def _problems(config: Config) -> dict[str, str]:
    """Return the accelerators into which the run does not fit, and why."""
    launch = config.launch
    if not launch.gpus:
        return {}
    known = {name: replace(GPUS[name], per_host=launch.gpus) for name in _kinds(config) if name in GPUS}
    found = {name: problem_on(config, gpu) for name, gpu in known.items()}
    return {name: problem for name, problem in found.items() if problem is not None}


def _ordered(config: Config, hosts: int) -> list[dict[str, Any]]:
    """Return the resources to try, place by place; without GPUs into which the run does not fit."""
    launch, sky = config.launch, config.launch.skypilot
    kinds: list[dict[str, Any]] = [{"cpus": "4+"}]
    if launch.gpus:
        left_out = _problems(config)
        kinds = [{"accelerators": f"{gpu}:{launch.gpus}"} for gpu in _kinds(config) if gpu not in left_out]
    tried = []
    for place in _places(launch, hosts):
        image = f"docker:{launch.image}" if launch.image else sky.images.get(place)
        own: dict[str, Any] = {"use_spot": True} if place in sky.spot else {}
        own |= {"image_id": image} if image else {}
        tried += [{"infra": place, **kind, **own} for kind in kinds]
    return tried

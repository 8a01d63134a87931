"""Make a job of overrides: compose, check, choose ids, and find the secrets that its runs need."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_fleet.config import validate
from megatron_fleet.config.errors import UserError
from megatron_fleet.config.files import read_object
from megatron_fleet.config.load import load
from megatron_fleet.config.schema import Config, LaunchConfig
from megatron_fleet.config.secrets import SLACK_TOKEN, STORE, WANDB_KEY, without_secrets
from megatron_fleet.config.sections.hosted import HOSTED
from megatron_fleet.launch.job import ROOT, Job, Run, hosts_of
from megatron_fleet.storage.run_folder import IDENTITY, new_id

_FABRICS: dict[str, dict[str, str]] = {
    "auto": {},
    "ethernet": {"NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "^lo,docker"},
    # Links that flap for seconds end no collective; the bootstrap keeps off virtual interfaces.
    "infiniband": {"NCCL_IB_TIMEOUT": "22", "NCCL_SOCKET_IFNAME": "^lo,docker"},
    "efa": {"FI_PROVIDER": "efa", "NCCL_SOCKET_IFNAME": "^lo,docker"},
    "provider": {},
}
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
"""Line ends, of Unicode too, and other control characters."""
CARRIED = ("MFLEET_EPISODE_PYTHON", "HF_HOME", "HF_ENDPOINT", "HF_HUB_OFFLINE", "FLEET_BASE_URL")
"""Variables of this shell that go to the job when they are set."""
_NOT_CARRIED = ("MFLEET_TOKEN", "MFLEET_CONTROLLER", "MFLEET_CONTROLLER_FILE", "MFLEET_HOST_ADDRESS")
"""Variables that describe the run that this shell may belong to; a launched job does not inherit them."""


def plan(
    sets: Sequence[Sequence[str]], environ: Mapping[str, str], check: Callable[[Config], None] = validate.check
) -> Job:
    """Plan a job.

    Args:
        sets: overrides of each run; more than one is a sweep.
        environ: environment of this process.
        check: refuses a configuration that could not run.

    Raises:
        UserError: a run cannot work, or not as the section `launch` says.
    """
    return plan_of([load(overrides) for overrides in sets], sets, environ, check)


def plan_of(
    configs: Sequence[Config],
    sets: Sequence[Sequence[str]],
    environ: Mapping[str, str],
    check: Callable[[Config], None] = validate.check,
) -> Job:
    """Plan a job whose overrides are composed already; see `plan`.

    Args:
        configs: configuration of each run, in the order of ``sets``.
    """
    for config in configs:
        _check_texts(config)
        check(config)
        _check_launch(config)
        if config.launch != configs[0].launch:
            raise UserError("--multirun varies a key of the section launch; the runs of a sweep are launched alike.")
    first = configs[0]
    swept = len(configs) > 1
    runs = tuple(
        _run(config, overrides, index if swept else None)
        for index, (config, overrides) in enumerate(zip(configs, sets, strict=True))
    )
    names = secret_names(first, environ)
    variables = _FABRICS[first.launch.fabric] | first.launch.environment
    kept = without_secrets(environ, names=names)
    dropped = [name for name in kept if name in _NOT_CARRIED or _of_provider(first.launch, name)]
    carried = {name: value for name, value in kept.items() if name not in dropped} | variables
    return Job(
        name=first.run.name,
        config=first,
        runs=runs,
        folder=Path(first.run.out, "launch"),
        environ=carried,
        variables=(*variables, *(name for name in CARRIED if name in carried)),
        secrets=names,
        commit=commit(),
    )


def _of_provider(launch: LaunchConfig, variable: str) -> bool:
    return launch.fabric == "provider" and variable.startswith("NCCL_")


def _run(config: Config, overrides: Sequence[str], index: int | None) -> Run:
    """Fix the id of a run, and give those of a sweep (``index``) names and folders of their own."""
    out = Path(config.run.out)
    own: list[str] = []
    name = config.run.name
    if index is not None:
        out, name = out / str(index), f"{name}_{index}"
        # Relative where the user's is, because the job's folder may be another one.
        given = next((text.partition("=")[2] for text in reversed(overrides) if text.startswith("run.out=")), None)
        own = [f"run.name={name}", f"run.out={given or f'runs/{config.run.name}'}/{index}"]
    identity = out / IDENTITY
    found = read_object(identity, "choose another run.out").get("id") if identity.is_file() else None
    id_ = config.run.id if config.run.id and index is None else found or new_id(name)
    if index is not None and config.run.id:
        id_ = f"{config.run.id}_{index}"
    return Run((*overrides, *own, f"run.id={id_}"), out, id_)


def _check_texts(config: Config) -> None:
    """Refuse control characters in what goes into scripts, manifests and paths in them."""
    into_files = {
        "launch": config.launch.model_dump(),
        "run": config.run.model_dump(),
        "env.fleet.package": config.env.fleet.package,
    }
    for key, value in into_files.items():
        for name, text in _texts(value, key):
            if found := _CONTROL.search(text):
                near = text[max(found.start() - 40, 0) : found.end() + 20]
                raise UserError(f"{name}: {near!r} has a line end or another control character; write it without.")


def _texts(value: Any, key: str) -> Iterator[tuple[str, str]]:
    """Yield the texts of a value, and the names in its mappings, each with the key that it belongs to."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield key, name
            yield from _texts(inner, f"{key}.{name}")
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _texts(inner, key)


def _check_launch(config: Config) -> None:
    launch, world, hosts = config.launch, config.parallel.world_size, hosts_of(config)
    if config.cluster.ranks == "external":
        raise UserError("cluster.ranks=external: the launcher sets it where something else starts ranks; leave it out.")
    if config.run.resume == "never":
        raise UserError(
            "run.resume=never: a restarted job would discard its earlier training; choose a new run.out "
            "and run.id instead."
        )
    if config.policy.trainer == HOSTED and launch.kind != "local":
        raise UserError(
            f"launch.kind={launch.kind} with policy.trainer={HOSTED}: a hosted run uses no GPUs, but these hosts "
            f"would be rented with GPUs; start it with mfleet train on any machine (docs/run/hosted.md)."
        )
    if world % hosts:
        raise UserError(
            f"cluster.nodes={hosts}: {world} ranks (parallel.tensor × pipeline × context × data) cannot be divided "
            f"among them; change one of them."
        )
    if launch.kind not in ("local", "torchrun") and launch.gpus and world // hosts > launch.gpus:
        raise UserError(
            f"launch.gpus={launch.gpus}: each of cluster.nodes={hosts} hosts would have {world // hosts} ranks, one "
            f"for each GPU; raise cluster.nodes."
        )
    if not launch.shared_disk:
        _check_disks(config)
    for name, value in launch.environment.items():
        if not _VARIABLE.fullmatch(name) or without_secrets({name: value}) != {name: value}:
            raise UserError(
                f"launch.environment: {name} is not the name of a variable, or one of a secret; secrets come from this "
                f"shell's environment, by their names in launch.secrets."
            )


def _check_disks(config: Config) -> None:
    launch = config.launch
    claim = launch.kubernetes.claim if launch.kind == "kubernetes" else None
    if config.checkpoint.store.url is None and claim is None:
        raise UserError(
            f"launch.kind={launch.kind}: the hosts' disks end with the job, and it could not resume elsewhere; set "
            f"checkpoint.store.url=s3://bucket/prefix or gs://bucket/prefix."
        )
    if hosts_of(config) > 1 and config.checkpoint.export.last and claim is None:
        raise UserError(
            "checkpoint.export.last=true needs a folder that all hosts share (launch.shared_disk=false); set it to "
            "false, and convert a checkpoint of the store afterwards."
        )


def secret_names(config: Config, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names of the variables in ``environ`` that hold the secrets of a run with this configuration.

    Raises:
        UserError: one that ``launch.secrets`` names is not set.
    """
    missing = [name for name in config.launch.secrets if not environ.get(name)]
    if missing:
        raise UserError(f"launch.secrets: {', '.join(missing)} is not set in this shell; export it.")
    families = ["HF_TOKEN"]
    dumped = config.model_dump_json()
    if "s3://" in dumped or "gs://" in dumped:
        families += STORE
    if config.env.about.hosted:
        families.append("FLEET_")
    if config.logging.wandb.project:
        families.append(WANDB_KEY)
    if config.logging.mlflow.uri:
        families.append("MLFLOW_TRACKING_")
    if config.logging.slack.channel:
        families.append(SLACK_TOKEN)
    used = {name for name, value in environ.items() if value and name.startswith(tuple(families))}
    return tuple(sorted(used | set(config.launch.secrets)))


def commit() -> str | None:
    """Return the commit of the project's files; ``None``: no checkout of git, or files differ from it."""
    try:
        head, changed = (
            subprocess.run(
                ["git", *words], cwd=ROOT, env=without_secrets(os.environ), capture_output=True, text=True, timeout=60
            )
            for words in (["rev-parse", "HEAD"], ["status", "--porcelain"])
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return head.stdout.strip() if head.returncode == 0 and changed.returncode == 0 and not changed.stdout else None

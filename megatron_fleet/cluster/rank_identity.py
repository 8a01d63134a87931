"""Rank of a process, and the address of its controller, from environment variables.

Four kinds of variables identify the rank of a process:

* ``mfleet``: MFLEET_RANK and its three companions, set by our launchers;
* ``torchrun``: RANK and its three companions, with variables that only torchrun sets;
* ``variables``: the same four, set by something else;
* ``srun``: SLURM_PROCID and its companions, within a job step.

If two kinds are present they must agree, with one exception: when one srun task per node starts torchrun, Slurm counts
the torchrun agents.
"""

from __future__ import annotations

import re
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from megatron_fleet.config.errors import UserError

Source = Literal["mfleet", "torchrun", "variables", "srun"]
SOURCES: tuple[Source, ...] = get_args(Source)

_FIELDS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_TORCHRUN_MARKS = ("TORCHELASTIC_RUN_ID", "GROUP_RANK")
_TASKS = "SLURM_STEP_TASKS_PER_NODE"
"""Variable with the number of tasks on each host of a step, e.g. ``2(x3),1``."""
_NAMES = (
    *(f"MFLEET_{name}" for name in _FIELDS), *_FIELDS, "GROUP_RANK", "ROLE_RANK", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE",
    "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "SLURM_PROCID", "SLURM_NTASKS",
    "SLURM_NPROCS", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEPID",
)  # fmt: skip
_PREFIXES = ("TORCHELASTIC_", "PET_", "SLURM_STEP_", "PMI_", "PMIX_")


@dataclass(frozen=True, slots=True)
class RankIdentity:
    """Rank of a process.

    Attributes:
        local_rank, local_world_size: rank and number of ranks on its host.
        host: name of the host, as its launcher calls it.
        source: kind of variables that it was read from, for messages.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    host: str
    source: Source


def rank_identity(environ: Mapping[str, str]) -> RankIdentity:
    """Return the rank of this process.

    Raises:
        UserError: no variable is set, one is missing, not an integer or out of range, or two launchers contradict each
            other.
    """
    found: dict[Source, RankIdentity] = {}
    for source in SOURCES:
        # Under torchrun, the srun task is torchrun's agent, not the rank.
        if not (source == "srun" and "torchrun" in found) and (identity := _read(source, environ)) is not None:
            found[source] = identity
    if not found:
        raise UserError(_nothing_found(environ))
    first, *others = found.values()
    for other in others:
        if (first.rank, first.world_size) != (other.rank, other.world_size):
            raise UserError(
                f"The environment contradicts itself: {_spelt(first)}, but {_spelt(other)}; start ranks with one "
                f"launcher, or unset the variables that do not belong to it."
            )
    return first


def controller_address(environ: Mapping[str, str]) -> tuple[str, str]:
    """Return the controller's address as ``host:port``, and the run's token.

    Raises:
        UserError: MFLEET_CONTROLLER or MFLEET_TOKEN is missing or malformed. No message contains the token.
    """
    return _address(environ, lowest_port=1), _token(environ)


def run_token(environ: Mapping[str, str]) -> str:
    """Secret that every socket of a run requires: ``MFLEET_TOKEN``, as ranks and nodes read it, or a new one."""
    return environ.get("MFLEET_TOKEN", "").strip() or secrets.token_hex(32)


@dataclass(frozen=True, slots=True)
class ListenAt:
    """Address for the controller to listen on.

    Attributes:
        port: 0: any free port.
        file: the address is written there once it is bound, so that others need not guess a port; ``None``: no file.
    """

    host: str
    port: int
    file: Path | None


def listen_at(environ: Mapping[str, str]) -> ListenAt:
    """Read the listen address for the controller of a run with external ranks or several hosts.

    Raises:
        UserError: as `controller_address`; or the port is 0 without a file to write the chosen one to.
    """
    file = environ.get("MFLEET_CONTROLLER_FILE", "").strip()
    address, _ = _address(environ, lowest_port=0 if file else 1), _token(environ)
    host, port = address.rsplit(":", 1)
    return ListenAt(host, int(port), Path(file) if file else None)


def _address(environ: Mapping[str, str], lowest_port: int) -> str:
    address = environ.get("MFLEET_CONTROLLER", "").strip()
    if not address:
        raise UserError(
            "MFLEET_CONTROLLER is not set; set it to the host:port where `mfleet train` listens, for it and for every "
            "rank."
        )
    match = re.fullmatch(r"[^:\[\]\s]+:([0-9]{1,5})", address)
    if match is None or not lowest_port <= int(match[1]) < 65536:
        raise UserError(
            f"MFLEET_CONTROLLER={address} is not an address; write it as host:port. Port 0, any free one, is for "
            f"`mfleet train` with MFLEET_CONTROLLER_FILE, where it writes the address."
        )
    return address


def _token(environ: Mapping[str, str]) -> str:
    token = environ.get("MFLEET_TOKEN", "").strip()
    if not token:
        raise UserError(
            "MFLEET_TOKEN is not set; set the same secret, as from `openssl rand -hex 32`, for `mfleet train` and for "
            "every rank."
        )
    return token


def rank_variables() -> tuple[str, ...]:
    """Return names, and name prefixes (ending in ``_``), of variables that identify a rank or are meant for ranks only.

    A child process that is not a rank must not inherit them: torch.distributed and vLLM would apply them to themselves.
    """
    return _NAMES + _PREFIXES


def without_rank_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return a copy of ``environ`` without `rank_variables`."""
    return {name: value for name, value in environ.items() if name not in _NAMES and not name.startswith(_PREFIXES)}


def _read(source: Source, environ: Mapping[str, str]) -> RankIdentity | None:
    """Read the variables of one kind; ``None`` when they are not set."""
    if source == "srun":
        return _read_srun(environ)
    if source != "mfleet" and (source == "torchrun") != any(mark in environ for mark in _TORCHRUN_MARKS):
        return None
    names = tuple(f"MFLEET_{name}" if source == "mfleet" else name for name in _FIELDS)
    if not any(name in environ for name in names[:1] + names[2:3]):
        return None  # WORLD_SIZE alone does not identify a rank
    if missing := [name for name in names if name not in environ]:
        there = ", ".join(f"{name}={environ[name]}" for name in names if name in environ)
        raise UserError(
            f"The environment has {there}, but not {' and '.join(missing)}; set {', '.join(names)} together, or start "
            f"ranks with torchrun or srun."
        )
    rank, world, local, local_world = (_integer(environ, name) for name in names)
    _check_range((names[0], rank), (names[1], world))
    _check_range((names[2], local), (names[3], local_world))
    _check_local_world(names, world, local_world)
    return RankIdentity(rank, world, local, local_world, _host(environ), source)


def _read_srun(environ: Mapping[str, str]) -> RankIdentity | None:
    # The batch script itself also has SLURM_PROCID=0, but is not a task of a step.
    if "SLURM_PROCID" not in environ or "SLURM_STEP_ID" not in environ:
        return None
    # SLURM_NTASKS may be that of the enclosing allocation.
    world_name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    names = ("SLURM_PROCID", world_name, "SLURM_LOCALID", "SLURM_NODEID", _TASKS)
    if missing := [name for name in names if name not in environ]:
        raise UserError(
            f"SLURM_PROCID={environ['SLURM_PROCID']} is set, but not {' and '.join(missing)}; start ranks with srun, "
            f"which sets all of them, or unset the remaining SLURM_ variables."
        )
    rank, world, local, node = (_integer(environ, name) for name in names[:4])
    tasks = _tasks_per_node(environ[_TASKS])
    if not 0 <= node < len(tasks) or sum(tasks) != world:
        raise UserError(
            f"The environment contradicts itself: {_TASKS}={environ[_TASKS]}, SLURM_NODEID={node} and "
            f"{world_name}={world}; start ranks with srun, and leave its variables as they are."
        )
    _check_range(("SLURM_PROCID", rank), (world_name, world))
    _check_range(("SLURM_LOCALID", local), (f"tasks on host {node} ({_TASKS})", tasks[node]))
    return RankIdentity(rank, world, local, tasks[node], _host(environ), "srun")


def _tasks_per_node(text: str) -> list[int]:
    """Parse the number of tasks of each host: ``2(x3),1`` → ``[2, 2, 2, 1]``."""
    tasks: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]{1,7})(?:\(x([0-9]{1,7})\))?", part)
        if match is None:
            raise UserError(f"{_TASKS}={text} is not a list of tasks per host, as 2(x3),1; leave it as srun set it.")
        tasks += [int(match[1])] * int(match[2] or 1)
    return tasks


def _integer(environ: Mapping[str, str], name: str) -> int:
    # int() would also accept "1_0" and non-ASCII digits.
    if re.fullmatch(r"[0-9]{1,7}", environ[name]) is None:
        raise UserError(f"{name}={environ[name]} is not a number of ranks; set it to an integer from 0 on.")
    return int(environ[name])


def _check_range(position: tuple[str, int], size: tuple[str, int]) -> None:
    if position[1] >= size[1]:
        raise UserError(
            f"{position[0]}={position[1]} is not below {size[0]}={size[1]}; ranks count from 0, so correct one of them."
        )


def _check_local_world(names: tuple[str, ...], world: int, local_world: int) -> None:
    if local_world > world:
        raise UserError(f"{names[3]}={local_world} is more than {names[1]}={world}; correct one of them.")


def _host(environ: Mapping[str, str]) -> str:
    return environ.get("SLURMD_NODENAME") or socket.gethostname()


def _spelt(identity: RankIdentity) -> str:
    """Format the variables that an identity was read from, for a message."""
    rank, world = {
        "mfleet": ("MFLEET_RANK", "MFLEET_WORLD_SIZE"),
        "torchrun": ("torchrun's RANK", "WORLD_SIZE"),
        "variables": ("RANK", "WORLD_SIZE"),
        "srun": ("SLURM_PROCID", "SLURM_NTASKS"),
    }[identity.source]
    return f"{rank}={identity.rank} of {world}={identity.world_size}"


def _nothing_found(environ: Mapping[str, str]) -> str:
    if "SLURM_JOB_ID" in environ and "SLURM_STEP_ID" not in environ:
        job, tasks = environ["SLURM_JOB_ID"], environ.get("SLURM_NTASKS", "not set")
        return (
            f"This process runs in the script of Slurm job {job} itself (SLURM_NTASKS={tasks}, SLURM_STEP_ID not set) "
            f"and is not a rank; start it with srun."
        )
    return (
        "Nothing in the environment says which rank this process is; start ranks with mfleet train, mfleet node, "
        "torchrun or srun, or set MFLEET_RANK, MFLEET_WORLD_SIZE, MFLEET_LOCAL_RANK and MFLEET_LOCAL_WORLD_SIZE."
    )

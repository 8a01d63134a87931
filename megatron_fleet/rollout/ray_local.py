"""Ray for one run: a local cluster that nobody else can use and that ends with its owner, or one to join."""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
from collections.abc import Iterator
from pathlib import Path

from megatron_fleet.rollout.janitor import MARK

OBJECT_STORE_BYTES = 256 << 20
SOCKET_PATH_LIMIT = 107
"""Bytes of a unix socket's path on Linux."""
RAY_SOCKET_SUFFIX = 75
"""Ray's own part of it: /session_<date>_<pid>/sockets/plasma_store."""

_RANK_VARIABLES = (
    "RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE",
    "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", "MKL_NUM_THREADS",
)  # fmt: skip


def run_folder(run_id: str) -> Path:
    """A short, private folder for Ray's session: unix sockets in it must stay below the system's path limit."""
    base = tempfile.gettempdir()
    if len(base) + len(run_id) + 2 + RAY_SOCKET_SUFFIX > SOCKET_PATH_LIMIT:
        base = "/tmp"
    folder = Path(base, f"mf-{run_id}")
    folder.mkdir(mode=0o700)
    return folder


@contextlib.contextmanager
def children_environment(run_id: str) -> Iterator[None]:
    """What processes started within inherit: the run's mark, and nothing that says which trainer rank started them.

    torch.distributed and vLLM would take RANK and MASTER_ADDR in a Ray worker for their own.
    """
    before = dict(os.environ)
    for name in list(os.environ):
        if name in _RANK_VARIABLES or name.startswith(("TORCHELASTIC_", "PET_")):
            del os.environ[name]
    os.environ[MARK] = run_id
    try:
        yield
    finally:
        for name in _RANK_VARIABLES:
            if name in before:
                os.environ[name] = before[name]
        os.environ.update({name: value for name, value in before.items() if name.startswith(("TORCHELASTIC_", "PET_"))})
        del os.environ[MARK]


def authenticate() -> None:
    """Give Ray a token for this process's cluster; without one it writes one into the home directory for all later
    runs. Call before ``ray`` is imported, which reads it."""
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))


def start(folder: Path) -> None:
    """Join the cluster at RAY_ADDRESS, or start one in this process's care. Call within ``children_environment``."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    address = os.environ.get("RAY_ADDRESS")
    if address is None:
        authenticate()
    import ray

    common = {"log_to_driver": False, "namespace": "megatron_fleet", "logging_level": "warning"}
    if address is not None:
        ray.init(address=address, **common)
        return
    ray.init(
        num_cpus=1,  # all our actors take none; Ray starts as many idle workers as there are CPUs
        include_dashboard=False,
        object_store_memory=OBJECT_STORE_BYTES,
        _node_ip_address="127.0.0.1",
        _temp_dir=str(folder),
        **common,
    )

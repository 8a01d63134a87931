"""Ray for one run: a local cluster that nobody else can use and that ends with its owner, or one to join."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from megatron_fleet.cluster.inventory import LOOPBACK
from megatron_fleet.cluster.janitor import marks
from megatron_fleet.cluster.nodes import OBJECT_STORE_BYTES, RAY_SETTINGS, RayHead
from megatron_fleet.cluster.rank_identity import without_rank_variables
from megatron_fleet.config.errors import UserError
from megatron_fleet.config.secrets import without_secrets

JOIN_POLL_S = 0.1
SOCKET_PATH_LIMIT = 107
"""Bytes of a unix socket's path on Linux."""
RAY_SOCKET_SUFFIX = 79
"""Ray's own part of it: /ray/session_<date>_<pid>/sockets/plasma_store."""


def run_folder(run_id: str) -> Path:
    """A short, private folder for Ray's session: unix sockets in it must stay below the system's path limit."""
    base = tempfile.gettempdir()
    if len(base) + len(run_id) + 2 + RAY_SOCKET_SUFFIX > SOCKET_PATH_LIMIT:
        base = "/tmp"
    folder = Path(base, f"mf-{run_id}")
    folder.mkdir(mode=0o700)
    return folder


def temporary_files_in(folder: str) -> dict[str, str]:
    """Variables with which a process makes its temporary files, vLLM's sockets among them, in ``folder``; except what
    torch compiled, which the next run needs too."""
    compiled = os.path.expanduser("~/.cache/torchinductor")
    return {"TMPDIR": folder, "TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR", compiled)}


@contextlib.contextmanager
def children_environment(run_id: str) -> Iterator[dict[str, str]]:
    """The variables that processes started within inherit: the run's mark, no secret, nothing that names a rank."""
    before = dict(os.environ)
    inherited = without_secrets(without_rank_variables(before)) | marks(run_id)
    _replace_environment(inherited)
    try:
        yield inherited
    finally:
        added = {name: value for name, value in os.environ.items() if name not in inherited}
        _replace_environment(before | added)


def _replace_environment(variables: Mapping[str, str]) -> None:
    for name in os.environ.keys() - variables.keys():
        del os.environ[name]
    os.environ.update(variables)


def authenticate() -> None:
    """Give Ray a token for this process's cluster; without one it writes one into the home directory for all later
    runs. Call before ``ray`` is imported, which reads it."""
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))


def start(run_id: str, folder: Path, host: str) -> RayHead | None:
    """Join the cluster at RAY_ADDRESS, or start one in this process's care. Blocks for some seconds.

    Call within ``children_environment``.

    Args:
        host: address of this machine that the cluster's other machines reach.

    Returns:
        How other machines join; ``None``: the cluster is somebody else's.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    address = os.environ.get("RAY_ADDRESS")
    if address is None:
        for name, value in RAY_SETTINGS.items():
            os.environ.setdefault(name, value)
        authenticate()
    import ray

    if host == LOOPBACK:
        # Ray would replace it by an address that other machines reach, and then listen on all of them.
        ray._private.ray_constants.ENABLE_RAY_CLUSTER = False
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # the same for its processes

    common = {"log_to_driver": False, "namespace": "megatron_fleet", "logging_level": "warning"}
    with _termination_handler_kept():
        if address is not None:
            ray.init(address=address, **common)
            return None
        ray.init(
            num_cpus=1,  # all our actors take none; Ray starts as many idle workers as there are CPUs
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            _node_ip_address=host,
            # A folder of its own: Ray opens it to everybody. The one around it stays private.
            _temp_dir=str(folder / "ray"),
            **common,
        )
    trust = {name: os.environ[name] for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN")}
    return RayHead(ray.get_runtime_context().gcs_address, trust, str(folder), run_id)


def keep_logs(folder: Path, logs: Path) -> None:
    """Copy what Ray wrote in a run's folder to ``logs/ray``."""
    for session in folder.glob("ray/session_2*/logs"):
        shutil.copytree(session, logs / "ray", dirs_exist_ok=True, ignore_dangling_symlinks=True)


def live_nodes() -> dict[str, str]:
    """Ids of the cluster's live nodes by their address."""
    import ray

    return {str(node["NodeManagerAddress"]): str(node["NodeID"]) for node in ray.nodes() if node["Alive"]}


async def wait_for_nodes(addresses: Collection[str], timeout_s: float) -> None:
    """Wait until the machines with these addresses have joined. Raises UserError when some have not in time."""
    deadline = time.monotonic() + timeout_s
    while missing := [address for address in addresses if address not in live_nodes()]:
        if time.monotonic() > deadline:
            raise UserError(
                f"{', '.join(missing)} did not join Ray within {timeout_s:g} s (cluster.join_timeout_s); the logs of "
                f"these hosts' `mfleet node` say why."
            )
        await asyncio.sleep(JOIN_POLL_S)


@contextlib.contextmanager
def _termination_handler_kept() -> Iterator[None]:
    """Ray sets a SIGTERM handler of its own, even where its owner has one."""
    handler = signal.getsignal(signal.SIGTERM)
    yield
    if handler not in (signal.SIG_DFL, None) and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)

"""Ray for one run: a private local cluster that ends with its owner, or an existing cluster to join."""

from __future__ import annotations

import asyncio
import contextlib
import functools
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
from megatron_fleet.cluster.joined_nodes import OBJECT_STORE_BYTES, RAY_SETTINGS, RayHead
from megatron_fleet.cluster.rank_identity import without_rank_variables
from megatron_fleet.config.errors import UserError
from megatron_fleet.config.secrets import RAY, without_secrets

JOIN_POLL_S = 0.1
SOCKET_PATH_LIMIT = 107
"""Most bytes of a unix socket's path on Linux."""
RAY_SOCKET_SUFFIX = 79
"""Bytes of Ray's part of the path: /ray/session_<date>_<pid>/sockets/plasma_store."""


def run_folder(run_id: str) -> Path:
    """Create a private folder for Ray's session, with a short path because of the system's limit for unix sockets."""
    base = tempfile.gettempdir()
    if len(base) + len(run_id) + 2 + RAY_SOCKET_SUFFIX > SOCKET_PATH_LIMIT:
        base = "/tmp"
    folder = Path(base, f"mf-{run_id}")
    folder.mkdir(mode=0o700)
    return folder


def temporary_files_in(folder: str) -> dict[str, str]:
    """Return variables that make a process put its temporary files, including vLLM's sockets, into ``folder``; except
    torch's compile cache, which later runs reuse."""
    compiled = os.path.expanduser("~/.cache/torchinductor")
    return {"TMPDIR": folder, "TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR", compiled)}


@contextlib.contextmanager
def children_environment(run_id: str) -> Iterator[dict[str, str]]:
    """Set the environment that child processes inherit: with the run's mark, without secrets and rank variables."""
    before = dict(os.environ)
    inherited = without_secrets(without_rank_variables(before), names=RAY) | marks(run_id)
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
    """Set a Ray token for this process's cluster; without one Ray would write a token for all later runs to the home
    directory. Call before ``ray`` is imported, because the import reads it."""
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))


def _authenticate_by_own_token() -> None:
    """Send the user's Ray token, if there is one, to an existing cluster. Call before ``ray`` is imported.

    ``ray start`` requires the token where it finds one; a driver sends it only when RAY_AUTH_MODE is set. Clusters
    without authentication ignore it.
    """
    if not os.environ.keys().isdisjoint(RAY) or Path.home().joinpath(".ray", "auth_token").exists():
        os.environ.setdefault("RAY_AUTH_MODE", "token")


def start(run_id: str, folder: Path, host: str) -> RayHead | None:
    """Join the cluster at RAY_ADDRESS, or start one owned by this process. Blocks for some seconds.

    Call within ``children_environment``.

    Args:
        host: address of this host that is reachable from the cluster's other hosts.

    Returns:
        The data for other hosts to join; ``None``: an existing cluster was joined.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    address = os.environ.get("RAY_ADDRESS")
    if address is None:
        for name, value in RAY_SETTINGS.items():
            os.environ.setdefault(name, value)
        authenticate()
    else:
        _authenticate_by_own_token()
    import ray

    if host == LOOPBACK:
        # Ray would replace loopback by an external address, and then listen on all interfaces.
        ray._private.ray_constants.ENABLE_RAY_CLUSTER = False
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # the same for Ray's processes

    common = {"log_to_driver": False, "namespace": "megatron_fleet", "logging_level": "warning"}
    with _termination_handler_kept():
        if address is not None:
            ray.init(address=address, **common)
            return None
        with _without_monitors():
            ray.init(
                num_cpus=1,  # our actors reserve no CPUs, and Ray starts one idle worker per CPU
                include_dashboard=False,
                object_store_memory=OBJECT_STORE_BYTES,
                _node_ip_address=host,
                # A subfolder, because Ray makes it world-accessible; its parent stays private.
                _temp_dir=str(folder / "ray"),
                **common,
            )
    trust = {name: os.environ[name] for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN")}
    return RayHead(ray.get_runtime_context().gcs_address, trust, str(folder), run_id)


def keep_logs(folder: Path, logs: Path) -> None:
    """Copy Ray's logs from a run's folder to ``logs/ray``."""
    for session in folder.glob("ray/session_2*/logs"):
        shutil.copytree(session, logs / "ray", dirs_exist_ok=True, ignore_dangling_symlinks=True)


def live_nodes() -> dict[str, str]:
    """Return the ids of the cluster's live nodes by address."""
    import ray

    return {str(node["NodeManagerAddress"]): str(node["NodeID"]) for node in ray.nodes() if node["Alive"]}


async def wait_for_nodes(addresses: Collection[str], timeout_s: float) -> None:
    """Wait until the hosts with these addresses have joined. Raises UserError when some have not in time."""
    deadline = time.monotonic() + timeout_s
    while missing := [address for address in addresses if address not in live_nodes()]:
        if time.monotonic() > deadline:
            raise UserError(
                f"{', '.join(missing)} did not join Ray within {timeout_s:g} s (cluster.join_timeout_s); the logs of "
                f"these hosts' `mfleet node` say why."
            )
        await asyncio.sleep(JOIN_POLL_S)


@contextlib.contextmanager
def _without_monitors() -> Iterator[None]:
    """Keep ``ray.init`` from starting Ray's log monitor and autoscaler, which a run does not use.

    Each takes more than half a second of CPU at every start, and ``ray.init`` has no arguments to leave them out.
    """
    from ray._private import parameter

    original = parameter.RayParams
    parameter.RayParams = functools.partial(original, include_log_monitor=False, no_monitor=True)
    try:
        yield
    finally:
        parameter.RayParams = original


@contextlib.contextmanager
def _termination_handler_kept() -> Iterator[None]:
    """Restore the SIGTERM handler that Ray replaces with its own."""
    handler = signal.getsignal(signal.SIGTERM)
    yield
    if handler not in (signal.SIG_DFL, None) and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)

"""Server of the embedded fleet: ``python -m megatron_fleet.embedded_fleet.server --port 0 --ready-file F``."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import signal
import socket
import sys
from collections.abc import Collection
from pathlib import Path

import uvicorn

from megatron_fleet.config.errors import UserError
from megatron_fleet.config.sections.env import FaultRatesConfig
from megatron_fleet.embedded_fleet.connections import Connections, Guard
from megatron_fleet.embedded_fleet.environment import ACTION, NO_FAULTS, OBSERVATION, EmbeddedEnvironment
from megatron_fleet.embedded_fleet.faults import FaultSource, RandomFaults
from megatron_fleet.embedded_fleet.verifier_client import OPTIONAL_LAYERS, Limits, VerifierClient, check_sandbox
from megatron_fleet.envs.embedded_server import MAX_SESSIONS, TOKEN
from megatron_fleet.envs.openenv_client import import_openenv
from megatron_fleet.platform.processes import write_stacks_on_signal
from megatron_fleet.storage.local import write_atomically

PARENT_CHECK_S = 0.5
SHUTDOWN_S = 1


async def serve(
    port: int,
    ready_file: Path | None,
    *,
    host: str = "127.0.0.1",
    token: str = "",
    parent: int | None = None,
    faults: FaultSource = NO_FAULTS,
    limits: Limits | None = None,
    may_lack: Collection[str] = OPTIONAL_LAYERS,
    max_sessions: int = MAX_SESSIONS,
) -> None:
    """Serve until SIGTERM, or until the process ``parent`` is no longer this one's parent.

    Args:
        port: 0 for any free one.
        host: address to listen on.
        token: token required of clients; empty: none.
        may_lack: layers of the verifiers' sandbox that the machine lacks.
        ready_file: written atomically when the server listens: ``{"port": int, "pid": int}``.
    """
    core = import_openenv()
    listener = socket.socket()
    for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):  # the latter: the parent keeps the port for restarts
        listener.setsockopt(socket.SOL_SOCKET, option, 1)
    listener.bind((host, port))
    listener.listen(max_sessions)
    verifier = VerifierClient(limits, may_lack)
    app = core.create_app(
        lambda: EmbeddedEnvironment(verifier, faults),
        ACTION,
        OBSERVATION,
        "embedded_fleet",
        max_concurrent_envs=max_sessions,
    )
    # Compression costs more CPU than it saves on a loopback connection.
    config = uvicorn.Config(
        Guard(Connections(app), token) if token else Connections(app),
        log_level="warning",
        ws_per_message_deflate=False,
        timeout_graceful_shutdown=SHUTDOWN_S,
        lifespan="off",
    )
    server = uvicorn.Server(config)
    # uvicorn shuts down on SIGTERM and then raises it again, which must not skip the clean-up below.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    watch = asyncio.create_task(_watch(server, listener, ready_file, parent))
    try:
        await server.serve(sockets=[listener])
    finally:
        watch.cancel()
        verifier.close()


async def _watch(server: uvicorn.Server, listener: socket.socket, ready_file: Path | None, parent: int | None) -> None:
    """Report when the server is ready; stop it when the parent is gone.

    The kernel's parent-death signal follows the parent's *thread*, and a server may be started from a short-lived one.
    """
    while not server.started:
        await asyncio.sleep(0.01)
    if ready_file is not None:
        write_atomically(ready_file, json.dumps({"port": listener.getsockname()[1], "pid": os.getpid()}).encode())
    while parent is None or os.getppid() == parent:
        await asyncio.sleep(PARENT_CHECK_S)
    signal.raise_signal(signal.SIGTERM)


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve the embedded fleet over OpenEnv.")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=0, help="0 = any free port")
    parser.add_argument("--ready-file", type=Path, help="written as JSON with the port when the server listens")
    parser.add_argument("--parent", type=int, help="stop when this process id is no longer the parent")
    parser.add_argument("--sandbox", choices=("full", "available"), default="available", help="as env.sandbox")
    parser.add_argument("--max-sessions", type=int, default=MAX_SESSIONS)
    parser.add_argument("--faults", help="rates of injected faults as JSON, with the keys of env.faults")
    parser.add_argument("--seed", type=int, default=0, help="seed of the faults")
    args = parser.parse_args()
    write_stacks_on_signal()
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))  # of which each session takes one
    try:
        missing, note = check_sandbox(args.sandbox)
    except UserError as error:
        sys.exit(f"error: {error}")
    if note:
        print(f"warning: {note}", file=sys.stderr, flush=True)
    faults = RandomFaults(FaultRatesConfig.model_validate_json(args.faults), args.seed) if args.faults else NO_FAULTS
    where = {"host": args.host, "token": os.environ.pop(TOKEN, "")}
    asyncio.run(
        serve(
            args.port,
            args.ready_file,
            **where,
            parent=args.parent,
            faults=faults,
            may_lack=missing,
            max_sessions=args.max_sessions,
        )
    )


if __name__ == "__main__":
    main()

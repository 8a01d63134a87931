"""Client that owns a verifier host and requests verdicts from it."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from megatron_fleet.config.errors import UserError
from megatron_fleet.envs.base import Reward

CONCURRENT = 8
"""Maximum number of concurrent verifiers; bounds memory to this many times ``Limits.memory_bytes``."""
OPTIONAL_LAYERS = ("user", "namespaces", "landlock")
"""Layers of the sandbox, named as in sandbox.py, without which verifiers run unless env.sandbox=full."""
SANDBOX, HOST = (Path(__file__).with_name(name) for name in ("sandbox.py", "verifier_host.py"))
GRACE_S = 5.0
"""Time beyond the verifier's own deadline for the host to report the outcome."""


def check_sandbox(wanted: Literal["full", "available"]) -> tuple[tuple[str, ...], str]:
    """Check which layers of the sandbox this machine has.

    Returns:
        Names of the missing ones, and a warning about them; empty if there are none.

    Raises:
        UserError: a layer required by ``wanted`` (env.sandbox) is missing, or the system call filter, without which a
            verifier could do anything that this user can.
    """
    probe = subprocess.run([sys.executable, "-I", str(SANDBOX)], stdout=subprocess.PIPE, env={}, check=True)
    missing = json.loads(probe.stdout)
    if not missing:
        return (), ""
    lacks = "this machine's kernel or container forbids " + ", ".join(
        f"{name} ({why})" for name, why in missing.items()
    )
    if "system calls" in missing:
        raise UserError(f"Verifiers cannot be confined: {lacks}; use a machine with seccomp, or env.kind=openenv.")
    if wanted == "full":
        raise UserError(f"env.sandbox=full: {lacks}; allow it, or set env.sandbox=available.")
    return tuple(missing), f"Verifiers run without a layer of their sandbox: {lacks}."


@dataclass(frozen=True, slots=True)
class Limits:
    """Resource limits of one verification. ``wall_s`` counts from its start and excludes time in the queue."""

    cpu_s: int = 5
    wall_s: float = 10.0
    memory_bytes: int = 256 * 2**20


class VerifierClient:
    """Starts a verifier host in its own empty directory without environment variables; restarts it when it died.

    Use it from one event loop, on a thread that lives as long as the client (the host dies with that thread).
    """

    def __init__(self, limits: Limits | None = None, may_lack: Collection[str] = OPTIONAL_LAYERS) -> None:
        """``may_lack``: layers of the sandbox that a host may lack; one without another layer ends at once."""
        self._limits = limits or Limits()
        self._may_lack = json.dumps(sorted(may_lack))
        self._slots = asyncio.Semaphore(CONCURRENT)
        # The path of a Unix socket is limited to 107 bytes, and a cluster's TMPDIR can be long.
        short = None if len(tempfile.gettempdir()) < 60 else "/tmp"
        self._folder = Path(tempfile.mkdtemp(prefix="verifier-", dir=short))
        (self._folder / "cwd").mkdir(mode=0o555)
        self._path = str(self._folder / "socket")
        # The client keeps the listening socket, so a restarted host finds the waiting connections.
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self._path)
        self._listener.listen(1024)
        self._host = self._start_host()

    async def verify(
        self,
        code: str,
        seed: bytes,
        current: bytes,
        final_answer: str | None,
        conversation: list[dict[str, Any]] | None,
    ) -> Reward:
        """Return the verdict, or an unknown reward with the reason. Never raises, except on cancellation."""
        head = {
            "code": code,
            "final_answer": final_answer,
            "conversation": conversation,
            "seed_bytes": len(seed),
            "current_bytes": len(current),
        }
        async with self._slots:
            if self._host.poll() is not None:
                self._host = self._start_host()
            try:
                async with asyncio.timeout(self._limits.wall_s + GRACE_S):
                    reply = await self._ask(json.dumps(head).encode() + b"\n" + seed + current)
                value = reply["value"]
                return Reward(None if value is None else float(value), str(reply["reason"]))
            except (OSError, TimeoutError, ValueError, TypeError, KeyError, OverflowError) as error:
                return Reward(None, f"verifier host gave no verdict ({type(error).__name__})")

    async def _ask(self, request: bytes) -> dict[str, Any]:
        reader, writer = await asyncio.open_unix_connection(self._path)
        try:
            writer.write(request)
            await writer.drain()
            return json.loads(await reader.readline())
        finally:
            writer.close()

    def _start_host(self) -> subprocess.Popen[bytes]:
        fd = self._listener.fileno()
        command = [sys.executable, "-I", str(HOST), str(fd), str(os.getpid()), json.dumps(asdict(self._limits))]
        return subprocess.Popen(
            [*command, self._may_lack],
            pass_fds=(fd,),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            cwd=self._folder / "cwd",
            env={},
        )

    def close(self) -> None:
        """Stop the host and remove its folder."""
        self._host.kill()
        self._host.wait()
        self._listener.close()
        shutil.rmtree(self._folder, ignore_errors=True)

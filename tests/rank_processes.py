"""A script as every rank of a distributed job on this machine."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path


def run_ranks(script: Path, world: int, folder: Path, *arguments: str, timeout_s: float = 600) -> list[str]:
    """Run ``script folder *arguments`` as ranks 0 to ``world`` − 1 and wait for all; what each of them printed.

    It also lies in ``folder``, as ``<script>.<world>.<rank>.log``. A rank that fails or takes too long fails the test;
    the others are ended.
    """
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    common = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    logs = [folder / f"{script.stem}.{world}.{rank}.log" for rank in range(world)]
    ranks = []
    try:
        for rank, path in enumerate(logs):
            env = os.environ | common | {"RANK": str(rank)}
            command = [sys.executable, script, folder, *arguments]
            with path.open("w") as log:
                ranks.append(subprocess.Popen(command, env=env, stdout=log, stderr=log))
        codes = [rank.wait(timeout_s) for rank in ranks]
    finally:
        for process in ranks:
            process.kill()
    said = [path.read_text() for path in logs]
    assert codes == [0] * world, "\n".join(text[-3000:] for text in said)
    return said

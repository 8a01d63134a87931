"""A script as every rank of a distributed job on this machine."""

from __future__ import annotations

import gc
import multiprocessing
import os
import runpy
import sys
import time
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from unittest import mock

SHARED = [str(Path(__file__).parent / name) for name in (".", "weights", "trainer")]
"""Folders of what tests of several folders share, as pyproject's ``pythonpath`` names them."""

LAST_WORDS_S = 10.0
"""For the other ranks, when one has failed: they wait for it and would not end by themselves."""

IMPORTED = ["megatron_fleet.trainer.verbs", "pytest"]
"""Modules that every rank would import, for five seconds of CPU each. None starts a thread, so they can be forked."""


def run_ranks(script: Path, world: int, folder: Path, *arguments: str, timeout_s: float = 600) -> list[str]:
    """Run ``script folder *arguments`` as ranks 0 to ``world`` − 1 and wait for all; what each of them printed.

    It also lies in ``folder``, as ``<script>.<world>.<rank>.log``. The script may import what tests share. A rank that
    fails or takes too long fails the test; the others are ended. Ranks are forks of one process that has imported
    Megatron and done nothing else. They meet, as under torchrun, at a store of the process that starts them: it has its
    port before anybody is told.
    """
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    common = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    common |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "OMP_NUM_THREADS": "1"}
    logs = [folder / f"{script.stem}.{world}.{rank}.log" for rank in range(world)]
    forks = multiprocessing.get_context("forkserver")
    forks.set_forkserver_preload(IMPORTED)
    with mock.patch.dict(os.environ, OMP_NUM_THREADS="1"):  # OpenMP reads it when torch is imported
        forkserver.ensure_running()
    ranks: list[ForkServerProcess] = []
    try:
        for rank, log in enumerate(logs):
            environment = os.environ | common | {"RANK": str(rank)}
            ranks.append(forks.Process(target=_rank, args=(script, [str(folder), *arguments], environment, log)))
            ranks[-1].start()
        codes = _wait(ranks, timeout_s)
    finally:
        for process in ranks:
            process.kill()
            process.join()
    said = [path.read_text() for path in logs]
    assert codes == [0] * world, "\n".join([f"exit codes {codes}", *(text[-3000:] for text in said)])
    return said


def _rank(script: Path, arguments: list[str], environment: dict[str, str], log: Path) -> None:
    """Become what ``python script *arguments`` would be, with its output in ``log``."""
    gc.freeze()  # what was imported need not be looked through at each collection
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [str(script), *arguments]
    sys.path[:0] = [str(script.parent), *SHARED]
    with log.open("w") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    runpy.run_path(str(script), run_name="__main__")


def _wait(ranks: list[ForkServerProcess], timeout_s: float) -> list[int | None]:
    """Exit codes when all have ended, one has failed and the others had time to say so, or the time is over."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end and None in (codes := [rank.exitcode for rank in ranks]):
        if any(codes):
            end = min(end, time.monotonic() + LAST_WORDS_S)
        time.sleep(0.05)
    return [rank.exitcode for rank in ranks]

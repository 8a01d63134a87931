"""Verdicts per second and core: the embedded fleet's verifiers, each in its sandbox.

    python benchmarks/verdicts.py [--rounds 10]   # in the engine environment

Everything runs on one core: the verifier host, its children, and this process. Rounds of both kinds take turns, each
over the verifiers of the same tasks:

* ``sandboxed_per_s``: over `VerifierClient`, as the environment server asks, eight at a time.
* ``plain_per_s``: the reference. The same verifiers in this process, which no verifier that is not ours may be.
* ``sandbox_ms``: what a verdict costs beyond the reference; ``ratio``: the first over the second. Medians of the
  rounds' pairs.
* ``page_fault_us``: what this machine takes to give a process a page. A verdict needs about 700, in a process of its
  own: on virtual machines, where a page may cost ten times what it does elsewhere, they are most of ``sandbox_ms``.

The last line of the output is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import mmap
import os
import statistics
import time

from measured import stamp

from megatron_fleet.embedded_fleet.tasks import EmbeddedSession, generate
from megatron_fleet.embedded_fleet.verifier_client import VerifierClient, check_sandbox
from megatron_fleet.embedded_fleet.verify import run_verifier


async def sandboxed(client: VerifierClient, sessions: list[EmbeddedSession]) -> float:
    """Seconds for a verdict on each session."""
    started = time.perf_counter()
    asked = (client.verify(s.task.verifier_code, s.world.seed, s.world.current(), None, None) for s in sessions)
    verdicts = await asyncio.gather(*asked)
    assert all(verdict.value is not None for verdict in verdicts), verdicts
    return time.perf_counter() - started


def plain(sessions: list[EmbeddedSession]) -> float:
    """Seconds for a verdict on each session, in this process."""
    started = time.perf_counter()
    for s in sessions:
        run_verifier(s.task.verifier_code, s.world.seed, s.world.current(), None, None)
    return time.perf_counter() - started


def page_fault_us() -> float:
    """Microseconds that the first write to a page takes beyond the second."""
    pages, seconds = 20_000, []
    with mmap.mmap(-1, pages * mmap.PAGESIZE) as memory:
        memory.madvise(mmap.MADV_NOHUGEPAGE)
        for _ in range(2):
            started = time.perf_counter()
            for page in range(pages):
                memory[page * mmap.PAGESIZE] = 1
            seconds.append(time.perf_counter() - started)
    return 1e6 * (seconds[0] - seconds[1]) / pages


async def measure(rounds: int) -> dict[str, object]:
    """Figures over so many rounds, after one that does not count."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    sessions = [EmbeddedSession(task) for task in generate(seed=2, per_env=50)]
    client = VerifierClient()
    try:
        pairs = [(await sandboxed(client, sessions), plain(sessions)) for _ in range(1 + rounds)][1:]
    finally:
        client.close()
    return {
        "verdicts": len(sessions) * rounds,
        "sandbox": check_sandbox("available")[1] or "full",
        "sandboxed_per_s": round(len(sessions) / statistics.median(a for a, _ in pairs), 1),
        "plain_per_s": round(len(sessions) / statistics.median(b for _, b in pairs), 1),
        "sandbox_ms": round(1e3 * statistics.median(a - b for a, b in pairs) / len(sessions), 2),
        "ratio": round(statistics.median(b / a for a, b in pairs), 3),
        "page_fault_us": round(statistics.median(page_fault_us() for _ in range(5)), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10, help="rounds that count (default: %(default)s)")
    rounds = parser.parse_args().rounds
    print(json.dumps({"benchmark": "verdicts", **stamp(__file__), **asyncio.run(measure(rounds))}))


if __name__ == "__main__":
    main()

"""Many episodes at once against the embedded fleet, with a stub policy.

    python benchmarks/env_concurrency.py [--concurrency 1000] [--rounds 10]   # in the engine environment

Two processes: the embedded fleet's server, and an EpisodeWorker with its real adapter, provisioning, renderer and agent
loop. Only the policy is a stub, which says the scripted solver's turns at once. All episodes of a round are open
together: the first turn waits until every session has been reset.

* ``sessions_per_s``, ``tool_calls_per_s``: over whole rounds (connect, reset, list tools, calls, verify, close).
* ``…_cpu_ms_per_session``: CPU of each process, which a busy machine disturbs less than the rates.
* ``ratio``: sessions/s over those of OpenEnv's own client sending the same messages, in rounds that take turns.
* ``loop_lag``: how late each process's event loop wakes a sleeper during our rounds.
* ``session_kib``: slope of the server's memory over the number of open sessions, on a fresh server.
* ``leaks``: what the two processes hold more after the last round than after the second; ``rss_kib_per_episode`` is the
  slope of their memory in between.

The last line of the output is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from measured import stamp
from roles import Role

from megatron_fleet.cluster.launcher import episode_python
from megatron_fleet.config.load import load

ROLES = Path(__file__).with_name("env_concurrency_roles.py")
SETTLE_S = 2.0
"""After a round, for sessions to end and memory to be given back."""
BARE_EVERY = 3
"""One round of the reference for so many of ours."""
COUNTS = ("threads", "fds", "tasks", "sqlite", "children")


class Measured(Role):
    """A role whose memory counts."""

    def __init__(self, python: Path, role: str, settings: dict[str, Any]) -> None:
        super().__init__(ROLES, python, role, settings, {"OMP_NUM_THREADS": "1"})

    def rss_mib(self) -> float:
        return psutil.Process(self.pid).memory_info().rss / 2**20


class Pair:
    """A fresh server and a fresh worker that plays on it."""

    def __init__(self, python: Path, concurrency: int) -> None:
        overrides = ["experiment=quickstart", f"rollout.episodes_in_flight={concurrency}"]
        overrides += ["rollout.episode_timeout_s=600", "env.reset_timeout_s=300", "env.step_timeout_s=300"]
        overrides += ["env.verify_timeout_s=300", "env.make_timeout_s=300", "env.provisioning.lookahead=0"]
        config = load(overrides).model_dump(mode="json")
        self.server = Measured(python, "server", {})
        self.worker = Measured(python, "worker", {"config": config, "url": self.server.started["url"]})

    def play(self, how: str, episodes: int) -> dict[str, Any]:
        """One round of ``play`` or ``bare``, with the CPU seconds of both processes."""
        before = self.server.cpu_seconds()
        return self.worker.ask(how, episodes=episodes) | {"server_cpu_seconds": self.server.cpu_seconds() - before}

    def held(self) -> dict[str, dict[str, float]]:
        """Memory of the processes at rest."""
        time.sleep(SETTLE_S)
        return {"server": self.server.ask("resources"), "worker": self.worker.ask("resources")}

    def lag(self) -> dict[str, dict[str, float]]:
        return {"server": self.server.ask("lag"), "worker": self.worker.ask("lag")}

    def close(self) -> None:
        self.worker.close()
        self.server.close()


def session_kib(python: Path, concurrency: int) -> float:
    """Slope of the highest memory of a fresh server over the number of sessions open together."""
    pair = Pair(python, concurrency)
    points = []
    try:
        for quarter in range(1, 5):
            open_now = concurrency * quarter // 4
            points.append((open_now, _highest_rss(pair, open_now)))
    finally:
        pair.close()
    return 1024 * float(np.polyfit(*zip(*points, strict=True), 1)[0])


def _highest_rss(pair: Pair, episodes: int) -> float:
    seen, over = [pair.server.rss_mib()], threading.Event()

    def look() -> None:
        while not over.wait(0.05):
            seen.append(pair.server.rss_mib())

    looking = threading.Thread(target=look)
    looking.start()
    try:
        pair.worker.ask("play", episodes=episodes)
    finally:
        over.set()
        looking.join()
    return max(seen)


def measure(python: Path, concurrency: int, rounds: int) -> dict[str, Any]:
    """Everything but the memory of a session."""
    pair = Pair(python, concurrency)
    ours, bare, lags, held = [], [], [], []
    try:
        for number in range(rounds):
            if number % BARE_EVERY == 0:
                bare.append(pair.play("bare", concurrency))
                time.sleep(SETTLE_S)
            pair.lag()
            ours.append(pair.play("play", concurrency))
            lags.append(pair.lag())
            held.append(pair.held())
            print(f"round {number + 1}: {ours[-1]} {lags[-1]} {held[-1]}", file=sys.stderr, flush=True)
    finally:
        pair.close()
    return {
        "ours": _speed(ours, concurrency) | {"start_share": _median(r["start_s"] / r["seconds"] for r in ours)},
        "bare_client": _speed(bare, concurrency),
        "ratio": _median(r["seconds"] for r in bare) / _median(r["seconds"] for r in ours),
        "loop_lag": {
            role: {name: _median(lag[role][name] for lag in lags) for name in ("p50_ms", "p99_ms")}
            for role in ("server", "worker")
        },
        "leaks": {role: _leaks([h[role] for h in held], concurrency) for role in ("server", "worker")},
    }


def _speed(rounds: list[dict[str, Any]], episodes: int) -> dict[str, float]:
    return {
        "sessions_per_s": _median(episodes / r["seconds"] for r in rounds),
        "tool_calls_per_s": _median(r["tool_calls"] / r["seconds"] for r in rounds),
        "worker_cpu_ms_per_session": _median(1e3 * r["cpu_seconds"] / episodes for r in rounds),
        "server_cpu_ms_per_session": _median(1e3 * r["server_cpu_seconds"] / episodes for r in rounds),
    }


def _leaks(held: list[dict[str, float]], episodes: int) -> dict[str, float]:
    """From the second round on: the first one fills caches and pools."""
    held = held[1:]
    grown = {name: held[-1][name] - held[0][name] for name in COUNTS}
    slope = float(np.polyfit(range(len(held)), [h["rss_mib"] for h in held], 1)[0]) if len(held) > 1 else 0.0
    return grown | {"rss_mib": held[-1]["rss_mib"], "rss_kib_per_episode": 1024 * slope / episodes}


def _median(values: Any) -> float:
    return round(statistics.median(values), 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concurrency", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=10, help="of --concurrency episodes each")
    args = parser.parse_args()
    python = episode_python()
    found = measure(python, args.concurrency, args.rounds)
    found["session_kib"] = round(session_kib(python, args.concurrency), 1)
    settings = {"concurrency": args.concurrency, "episodes": args.concurrency * args.rounds}
    print(json.dumps({"figures": found, **settings, **stamp(__file__)}))


if __name__ == "__main__":
    main()

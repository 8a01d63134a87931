"""The first four minutes on a GPU machine: what works, what is right, in the order of information.

    python benchmarks/gpu/first.py                    all checks
    python benchmarks/gpu/first.py policy attention   some of them
    python benchmarks/gpu/first.py --list             what each checks

Each check runs in a process of its own with its own limit, some at the same time: none measures speed. When one ends,
its line (JSON) is added to OUT/DEVICE/first.jsonl and its output is in OUT/DEVICE/logs, so nothing is lost when another
one dies, or this command is interrupted. run.py measures speed afterwards.

The exit status is 1 if a check failed, was wrong, or did not come to its end, else 0.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

from battery import checks  # noqa: E402
from battery.hardware import NO_ENGINE, Device, environment, probe, python_path  # noqa: E402
from battery.results import ROOT, commit  # noqa: E402
from battery.supervise import end_group  # noqa: E402

from megatron_fleet.config.secrets import without_secrets  # noqa: E402

CORES = 4
"""Cores for each check that runs at the same time: a tiny policy, and its step on the CPU."""
SLOWER = 4
"""On a CPU limits are this many times longer."""
GOOD = ("ok", "skipped")


def parser() -> argparse.ArgumentParser:
    """Arguments of the command."""
    p = argparse.ArgumentParser(
        prog="first.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("checks", nargs="*", metavar="CHECK", help=f"these, in this order: {' '.join(checks.BY_NAME)}")
    p.add_argument("--list", action="store_true", help="say what each checks")
    p.add_argument("--out", type=Path, default=ROOT / "runs" / "gpu", help="folder of the results (default: runs/gpu)")
    p.add_argument("--minutes", type=float, default=4.0, help="limit of the whole command (default: 4)")
    p.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 1) // CORES), help="checks at the same time")
    p.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: the same code without a GPU")
    return p


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the checks; returns the exit status."""
    command = parser()
    args = command.parse_args(arguments)
    if unknown := [name for name in args.checks if name not in checks.BY_NAME]:
        command.error(f"there is no check {unknown[0]}; choose from {', '.join(checks.BY_NAME)}")
    for name in ("minutes", "jobs"):
        if getattr(args, name) <= 0:
            command.error(f"--{name} {getattr(args, name):g} is not above 0")
    chosen = [checks.BY_NAME[name] for name in args.checks] or [*checks.STEPS]
    if args.list:
        for step in chosen:
            print(f"{step.name:16} {step.about}")
        return 0
    try:
        machine = probe(args.device)
    except RuntimeError as error:
        command.error(str(error))
    began, found, out = time.monotonic(), [], args.out / machine.slug
    with First(out, args.device, machine.engine_problem, began + 60 * args.minutes) as first:
        for line in first.run(chosen, args.jobs):
            found.append(line)
            says = f": {line['says']}" if line["says"] else ""
            print(f"[{time.monotonic() - began:5.0f} s] {line['step']:16} {line['status']}{says}", flush=True)
    bad = [line["step"] for line in found if line["status"] not in GOOD]
    counts = f"{len(found) - len(bad)} of {len(found)} checks are ok or skipped"
    print(f"{counts}{'; not ' + ', '.join(bad) if bad else ''}. {out / checks.RESULTS}", flush=True)
    return int(bool(bad))


class First:
    """Checks in processes, which are ended when this is closed.

    Args:
        out: folder of ``first.jsonl`` and of the logs.
        engine_problem: why Transformer Engine cannot be used; empty where it can.
        end: time (`time.monotonic`) after which nothing runs.
    """

    def __init__(self, out: Path, device: Device, engine_problem: str, end: float) -> None:
        self._out, self._end = out, end
        self._env = without_secrets(os.environ) | environment(device, 1)
        self._env |= {"PYTHONPATH": python_path(), NO_ENGINE: engine_problem}
        # Otherwise cuBLAS computes float32 products of Transformer Engine in TF32, which differs from the CPU's.
        self._env["NVIDIA_TF32_OVERRIDE"] = "0"
        self._common = {"commit": commit(), "device": device}
        self._running: set[subprocess.Popen[bytes]] = set()
        (out / "logs").mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> First:
        return self

    def __exit__(self, *_: object) -> None:
        self._end = 0.0  # checks that have not begun do not begin
        for process in [*self._running]:
            end_group(process)

    def run(self, steps: Sequence[checks.Step], jobs: int) -> Iterator[dict[str, Any]]:
        """Yield the line of each check, in their order; each is written when the check ends."""
        with ThreadPoolExecutor(jobs) as pool:
            yield from pool.map(self._one, steps)

    def _one(self, step: checks.Step) -> dict[str, Any]:
        began = time.monotonic()
        limit = min(step.limit_s * (1 if self._common["device"] == "cuda" else SLOWER), self._end - began)
        if limit <= 0:
            line = {"step": step.name, "status": "not run", "says": "the command's minutes were over", "figures": {}}
        else:
            line = self._made(step, limit)
        line |= {"seconds": round(time.monotonic() - began, 1), **self._common}
        with (self._out / checks.RESULTS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")  # one write: lines of others are not cut
        return line

    def _made(self, step: checks.Step, limit: float) -> dict[str, Any]:
        log = self._out / "logs" / f"first-{step.name}.log"
        with tempfile.TemporaryDirectory(prefix=f"{step.name}-") as folder, log.open("wb") as output:
            command = [sys.executable, "-m", "battery.checks", step.name, folder]
            process = subprocess.Popen(
                command, env=self._env, stdout=subprocess.PIPE, stderr=output, start_new_session=True
            )
            self._running.add(process)
            says = ""
            try:
                answer, _ = process.communicate(timeout=limit)
            except subprocess.TimeoutExpired:
                end_group(process)
                answer, says = process.communicate()[0], f"not over after {limit:.0f} s"
            finally:
                self._running.discard(process)
            end_group(process)
        last = (answer.decode(errors="replace").strip().splitlines() or [""])[-1]
        try:
            line: dict[str, Any] = json.loads(last)
        except ValueError:
            lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            died = f"its process ended with status {process.returncode}: {lines[-1] if lines else 'no message'}"
            return {"step": step.name, "status": "failed", "says": says or died, "figures": {}}
        return line


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that checks are ended too
    sys.exit(main())

"""Measure this project on a GPU machine, most informative parts first.

    python benchmarks/gpu/run.py                         every part that can run here
    python benchmarks/gpu/run.py --list                  the parts, and what speaks against each here
    python benchmarks/gpu/run.py --parts device layers   some of them, in this order
    python benchmarks/gpu/run.py --minutes 9             in an allocation of ten minutes; the same command goes on later
    python benchmarks/gpu/page.py                        the page of the results, for the documentation

Each part runs in a process of its own with a limit, and writes OUT/DEVICE/PART.json as it measures, so an interrupted
run loses nothing. A part that has a result for the same code and device is not run again (--again runs it). What cannot
run here is skipped with its reason. No part needs a network.

The exit status is 1 if a part failed or reached its limit, else 0; goals that are not met do not change it.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import tarfile
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

from battery import show, supervise  # noqa: E402
from battery.hardware import GIB, Machine, probe  # noqa: E402
from battery.registry import BY_NAME, Part  # noqa: E402
from battery.results import ROOT, Result, code_version, read  # noqa: E402

MIN_SHARE = 0.5
"""A part begins only with this share of its limit left."""
RESERVE_S = supervise.GRACE_S
"""Kept of the whole run's time, for the end of a part that reached its limit."""


def parser() -> argparse.ArgumentParser:
    """Arguments of the command."""
    raw = argparse.RawDescriptionHelpFormatter
    p = argparse.ArgumentParser(prog="run.py", description=__doc__, formatter_class=raw)
    p.add_argument("--parts", nargs="+", metavar="PART", help=f"these, in this order: {' '.join(BY_NAME)}")
    p.add_argument("--skip", nargs="+", metavar="PART", default=[], help="all but these")
    p.add_argument("--list", action="store_true", help="say what the parts are and whether they can run here")
    p.add_argument("--out", type=Path, default=ROOT / "runs" / "gpu", help="folder of the results (default: runs/gpu)")
    p.add_argument("--archive", type=Path, metavar="FILE", help="also pack the results after each part: .tar.gz")
    p.add_argument("--minutes", type=float, default=90.0, help="limit of the whole run (default: 90)")
    p.add_argument("--part-minutes", type=float, help="limit of each part, in place of its own")
    p.add_argument("--again", action="store_true", help="run parts again that have a result for this code and device")
    p.add_argument("--scratch", type=Path, help="folder for temporary files, up to 25 GB (default: the system's)")
    p.add_argument(
        "--device", choices=["cuda", "cpu"], default="cuda", help="cpu: the same code at tiny sizes, without a GPU"
    )
    return p


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the battery; returns the exit status."""
    command = parser()
    args = command.parse_args(arguments)
    if unknown := [name for name in [*(args.parts or ()), *args.skip] if name not in BY_NAME]:
        command.error(f"there is no part {unknown[0]}; choose from {', '.join(BY_NAME)}")
    for name in ("minutes", "part_minutes"):
        if (value := getattr(args, name)) is not None and value <= 0:
            command.error(f"--{name.replace('_', '-')} {value:g} is not above 0")
    chosen = [BY_NAME[name] for name in args.parts or BY_NAME if name not in args.skip]
    args.scratch = args.scratch or Path(tempfile.gettempdir())
    args.scratch.mkdir(parents=True, exist_ok=True)
    try:
        battery = Battery(args, probe(args.device))
    except RuntimeError as error:
        command.error(str(error))
    screen = show.console()
    if args.list:
        screen.print(show.listing([(part, battery.problem(part)) for part in chosen], battery.machine.device))
        return 0
    results = battery.run(chosen)
    screen.print(show.summary([*results.values()]))
    if args.device == "cuda":
        screen.print(show.goals(results, chosen))
    screen.print(f"Results: {battery.out}", soft_wrap=True)
    return int(any(result.status in ("failed", "timeout") for result in results.values()))


class Battery:
    """Parts, one after the other.

    Attributes:
        out: folder of this device's results.
    """

    def __init__(self, args: argparse.Namespace, machine: Machine) -> None:
        self._args, self.machine = args, machine
        self._size: Any = "tiny" if args.device == "cpu" else "full"
        self._code = code_version()
        self.out: Path = args.out / machine.slug

    def problem(self, part: Part) -> str | None:
        """Reason why a part cannot run here; ``None`` if it can."""
        free = shutil.disk_usage(self._args.scratch).free / GIB
        return part.problem(self.machine, self._args.device, self._size, free)

    def run(self, chosen: Sequence[Part]) -> dict[str, Result]:
        """Run those without a result, while there is time; returns the results of all in their order."""
        end = time.monotonic() + 60 * self._args.minutes
        results: dict[str, Result] = {}
        progress = show.Progress(len(chosen))
        for part in chosen:
            progress.begin(part)
            known = read(self.out / f"{part.name}.json")
            if known is not None and known.is_current(self._code, self.machine, self._size) and not self._args.again:
                results[part.name] = known
                progress.end(known, " (from before)")
                continue
            results[part.name] = self._part(part, end - time.monotonic() - RESERVE_S, progress)
            progress.end(results[part.name])
            if self._args.archive:
                pack(self._args.out, self._args.archive)
        return results

    def _part(self, part: Part, left_s: float, progress: show.Progress) -> Result:
        limit = 60 * (self._args.part_minutes or part.minutes)
        problem = self.problem(part)
        if problem is None and left_s < MIN_SHARE * limit:
            problem = f"too little is left of --minutes {self._args.minutes:g}; run the command again"
        if problem is not None:
            return self._skipped(part, problem)
        how: Any = {"device": self._args.device, "size": self._size, "code": self._code, "tick": progress.tick}
        result = supervise.run(part, self.machine, self.out, self._args.scratch, **how, limit_s=min(left_s, limit))
        if result.status == "timeout" and left_s < limit:
            result.status = "interrupted"  # by the end of the whole run: the next command measures it again
            result.write(self.out / f"{part.name}.json")
        return result

    def _skipped(self, part: Part, problem: str) -> Result:
        """A result that says why. It replaces no file with measurements, be they partial or of other code."""
        result = supervise.new_result(part.name, self._code, self._size, self.machine)
        result.status, result.reason = "skipped", problem
        path = self.out / f"{part.name}.json"
        known = read(path)
        if known is None or not (known.figures or known.tables):
            result.write(path)
        return result


def pack(folder: Path, archive: Path) -> None:
    """Write a folder into a ``.tar.gz``, replacing it as a whole."""
    archive.parent.mkdir(parents=True, exist_ok=True)
    unfinished = archive.with_name(f".{archive.name}.part")
    with tarfile.open(unfinished, "w:gz") as target:
        target.add(folder, arcname=folder.name)
    unfinished.replace(archive)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the part is ended too
    sys.exit(main())

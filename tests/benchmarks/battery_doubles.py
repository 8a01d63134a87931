"""Parts of the GPU battery that behave as their name says, and variants that do."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

from battery import variants
from battery.results import Report, Request, Unavailable


def measure(report: Report, request: Request) -> None:
    with Path(request.keep, f"{request.part}.runs").open("a") as runs:
        runs.write("x")
    Path(request.scratch, "left behind").touch()
    report.doing("first")
    report.figures(one=1, scratch=request.scratch)
    globals()[request.part](report, request)


def good(report: Report, request: Request) -> None:
    report.row("rows", a=1, b=None)


def hangs(report: Report, request: Request) -> None:
    child = subprocess.Popen(["sleep", "100000"], start_new_session=True)
    report.figures(child=child.pid)
    report.doing("hanging")
    time.sleep(100_000)


def crashes(report: Report, request: Request) -> None:
    print("about to crash", flush=True)
    os.abort()


def raises(report: Report, request: Request) -> None:
    raise ValueError("first line\nsecond line")


def unavailable(report: Report, request: Request) -> None:
    raise Unavailable("nothing of the sort is here")


LAUNCHER = """
import runpy, sys
print("a launcher's greeting", flush=True)
del sys.argv[0:2]
runpy.run_module(sys.argv[0], run_name="__main__")
"""


def varied(report: Report, request: Request) -> None:
    for name in ("measures", "lacks", "fails", "dies", "measures again"):
        launch = ["-c", LAUNCHER] if name == "measures again" else []
        variants.run(report, __name__, name, {"name": name}, launch)


def variant(sink, settings) -> None:
    name = settings["name"]
    sink.doing(f"{name} now")
    print("what libraries print is no measurement")
    if name == "lacks":
        raise Unavailable("it is not installed")
    if name == "fails":
        raise ZeroDivisionError("by nothing")
    if name == "dies":
        os._exit(7)
    sink.row("rows", name=name)
    sink.figures(**{name.replace(" ", "_"): 1})

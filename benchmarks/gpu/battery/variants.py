"""Variants of a part, each in a process of its own: what one leaves behind (memory, patches) does not touch the next.

A variant's process prints its measurements as JSON lines on its standard output; everything else it prints goes to the
log. It belongs to the process group of its part, which is ended as a whole.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from battery.results import Report, Unavailable, first_line


def run(report: Report, module: str, name: str, settings: Mapping[str, Any], launch: Sequence[str] = ()) -> None:
    """Run ``<module>.variant(sink, settings)`` in a process. A failure is a problem of the part, which goes on.

    Args:
        name: of the variant, for messages.
        launch: arguments of Python that start several ranks, before ``-m battery.variants``.
    """
    report.doing(name)
    command = [sys.executable, *launch, "-m", "battery.variants", module, name, json.dumps(settings)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            try:
                method, given, named = json.loads(line)
            except ValueError:
                print(line, end="", flush=True)  # of the launcher
                continue
            getattr(report, method)(*given, **named)
    if process.returncode and name not in report.result.problems:
        report.problem(name, f"its process ended with status {process.returncode}; see the log")


class _Lines:
    """`Sink` that prints its calls as JSON lines, on the first rank alone."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._first = os.environ.get("RANK", "0") == "0"

    def __getattr__(self, method: str) -> Callable[..., None]:
        def say(*given: Any, **named: Any) -> None:
            if self._first:
                os.write(self._descriptor, json.dumps([method, given, named]).encode() + b"\n")

        return say


def main(module: str, name: str, settings: Mapping[str, Any]) -> int:
    """Measure a variant in this process; returns the exit status. What cannot run here is left out."""
    from megatron_fleet.config.errors import UserError

    sink: Any = _Lines(os.dup(1))
    os.dup2(2, 1)
    try:
        importlib.import_module(module).variant(sink, settings)
    except (Unavailable, UserError) as error:
        sink.leave_out(name, str(error))
    except Exception as error:
        traceback.print_exc()
        sink.problem(name, first_line(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3])))

"""The process of a part: ``python -m battery.child REQUEST`` with a `Request` as JSON."""

from __future__ import annotations

import importlib
import json
import sys
import warnings
from pathlib import Path

from battery.results import Report, Request, Result, read


def main(request: Request) -> int:
    """Measure, and write the result whatever happens; returns the exit status."""
    warnings.filterwarnings("ignore")
    Path(request.keep).mkdir(parents=True, exist_ok=True)
    report = Report(request, read(Path(request.result)) or Result(request.part))
    try:
        importlib.import_module(request.module).measure(report, request)
    except BaseException as error:
        report.close(error)
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        return 1 if report.result.status == "failed" else 0
    report.close()
    return 1 if report.result.status == "failed" else 0


if __name__ == "__main__":
    sys.exit(main(Request(**json.loads(sys.argv[1]))))

"""A logger of your own: `mfleet train logging.own=[my_logger:Csv]` (see README.md)."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path

from megatron_fleet.config.schema import Config

COLUMNS = ("reward/avg_pass_at_1", "policy/grad_norm")


class Csv:
    """Writes two metrics to `metrics.csv` in the folder of the run.

    Args:
        config: of the run.
        resumed_step: what was written after it is dropped; `None` begins anew.
        started: unix time at which this attempt began.
    """

    def __init__(self, config: Config, resumed_step: int | None, started: float) -> None:
        path = Path(config.run.out) / "metrics.csv"
        rows = []
        if resumed_step is not None and path.is_file():
            with path.open(newline="") as file:
                rows = [row for row in csv.reader(file) if row[0] != "step" and int(row[0]) <= resumed_step]
        self._file = path.open("w", newline="")
        self._writer = csv.writer(self._file)
        self._writer.writerows([("step", *COLUMNS), *rows])

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """The metrics of a step; called again for those that become known later, such as an evaluation's."""
        if any(name in metrics for name in COLUMNS):
            self._writer.writerow((step, *(metrics.get(name, "") for name in COLUMNS)))
            self._file.flush()

    def close(self, complete: bool = True) -> None:
        """The run came to its end (`complete`), or broke off."""
        self._file.close()

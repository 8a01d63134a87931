"""A whole run on real parts that is interrupted wherever its loop waits, one place after the other, loses nothing.

In CI, tests/loop/test_interruptions.py does the same with the trainer and the rollout in memory.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
from pathlib import Path

import pytest
from whole_runs import RUN_TIMEOUT_S, Run

from megatron_fleet.loop.stopping import REQUEUE

pytestmark = [pytest.mark.slow, pytest.mark.nightly(minutes=60), pytest.mark.timeout(2 * 3600)]

OVERRIDES = ("eval.interval=1", "checkpoint.interval=2", "rollout.engine.probe_interval=1")
SIGNALS = {signal.SIGTERM: (REQUEUE, 143, 0), signal.SIGINT: (130,), signal.SIGKILL: (-signal.SIGKILL,)}
PLACES = int(os.environ.get("MFLEET_TEST_PLACES", "1000"))
"""Number of places that are interrupted."""
SHARED = {"PYTHONPATH": str(Path(__file__).parents[1])}
"""What tests of several folders share."""


class Interrupted(Run):
    """A run that is started by the program that interrupts it."""

    place, number = "", 0

    @property
    def waited(self) -> list[str]:
        """Places where its newest attempt waited, in order."""
        return self.out.with_suffix(".places").read_text().splitlines()

    def command(self) -> list[str]:
        program = Path(__file__).with_name("interrupted_program.py")
        return [sys.executable, str(program), str(self.out.with_suffix(".places")), self.place, str(self.number)]


def test_a_run_that_is_interrupted_at_every_place_ends_like_an_undisturbed_one(tmp_path):
    whole = Interrupted(tmp_path / "whole", OVERRIDES, environ=SHARED)
    whole.finish()
    places = list(dict.fromkeys(place for place in whole.waited if "|" in place and not place.endswith("|")))
    run = Interrupted(tmp_path / "interrupted", OVERRIDES, environ=SHARED)
    signals, missed = itertools.cycle(SIGNALS.items()), []
    for place in places[:: max(1, len(places) // PLACES)]:
        (number, statuses), run.place = next(signals), place
        run.number = number
        process = run.start()
        output, _ = process.communicate(timeout=RUN_TIMEOUT_S)
        assert process.returncode in (*statuses, 0), (place, output[-2000:] + run.logs())
        run.assert_nothing_left()
        if place not in run.waited:
            missed.append(place)  # as it lies before the step that is saved, or the run has ended
    run.place = ""
    run.finish()
    assert run.facts() == whole.facts()
    assert (run.out / "hf/model.safetensors").read_bytes() == (whole.out / "hf/model.safetensors").read_bytes()
    assert len(missed) <= len(places) // 4, missed

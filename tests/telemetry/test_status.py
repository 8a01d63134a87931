"""``status.json``: what is written is read again, and what is no status is refused in a sentence."""

from __future__ import annotations

import json
import math
from dataclasses import asdict

import pytest

from megatron_fleet.config.errors import UserError
from megatron_fleet.telemetry.status import (
    STATUS,
    Alert,
    EngineStatus,
    EnvironmentStatus,
    PhaseStatus,
    RunStatus,
    read_status,
)

NOW = RunStatus(
    *("demo", "demo_1", "running", "node-0", 7),
    time=1000.5,
    started=0.0,
    step=2,
    steps=4,
    step_began=990.0,
    phases=[PhaseStatus("rollout", 990.0, None, 1, 2)],
    engines=[EngineStatus("engine 0", True, 2.0, 1.0, 0.5, 9.0)],
    environments={"a/b": EnvironmentStatus(3, 2, -0.5, 4, 1, 0)},
    memory={"controller": 1 << 30},
    alerts=[Alert(990.0, "WARNING", "slow")],
)


def test_what_is_written_is_read_again(tmp_path):
    assert read_status(tmp_path) is None
    NOW.write(tmp_path)
    assert read_status(tmp_path) == NOW and [path.name for path in tmp_path.iterdir()] == [STATUS]


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("state",), "dreaming"),
        (("time",), 1e300),
        (("step",), -1),
        (("phases", 0, "seconds"), -1.0),
        (("engines", 0, "kv_usage"), math.inf),
        (("environments", "a/b", "reward"), "high"),
        (("memory", "controller"), 10**400),
        (("alerts", 0, "text"), None),
    ],
)
def test_what_is_no_status_is_refused(tmp_path, place, value):
    whole = part = asdict(NOW)
    for key in place[:-1]:
        part = part[key]
    part[place[-1]] = value
    (tmp_path / STATUS).write_text(json.dumps(whole))
    with pytest.raises(UserError, match=rf"{STATUS}: .*{place[-1]}.*remove it"):
        read_status(tmp_path)

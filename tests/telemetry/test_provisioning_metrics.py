"""What workers leave in episodes about starting environments, as metrics of a step."""

import numpy as np

from megatron_fleet.agents.trajectory import Group, Outcome, Trajectory
from megatron_fleet.telemetry import registry
from megatron_fleet.telemetry.provisioning import provisioning_metrics


def group(env_key, *metrics):
    empty = np.zeros(0, np.int32), np.zeros(0, bool), np.zeros(0, np.float32)
    trajectories = [
        Trajectory("t", env_key, 0, i, *empty, (), None, "", Outcome.ENV_FAILED, metrics=dict(m))
        for i, m in enumerate(metrics)
    ]
    return Group(0, "t", env_key, trajectories)


def test_values_by_hand():
    played = {"provision_s": 3.0, "start_retries": 2.0, "start_limit": 4.0, "breaker_open": 0.0, "loop_lag_p99": 0.01}
    played["attempts_retried"] = 2
    quick = played | {
        "provision_s": 1.0,
        "start_retries": 1.0,
        "start_limit": 8.0,
        "attempts_retried": 1,
        "loop_lag_p99": 0.5,
    }
    refused = {"quarantined": 1.0, "breaker_open": 1.0, "start_limit": 6.0, "loop_lag_p99": 0.02}
    found = provisioning_metrics([group("a/b", played, quick), group("a/b", refused, {}), group("c", {})])
    assert found == {
        "environment/a_b/quarantined": 1,
        "environment/a_b/breaker_open": 1,
        "environment/a_b/start_retries": 3,
        "environment/a_b/attempts_retried": 3,
        "timing/provision_s/a_b": 2.0,  # of those that asked for one
        "timing/start_limit/a_b": 6.0,
        "environment/c/quarantined": 0,
        "environment/c/breaker_open": 0,
        "environment/c/start_retries": 0,
        "environment/c/attempts_retried": 0,
        "timing/loop_lag_p99": 0.5,
    }
    assert all(registry.find(name) for name in found)

"""The image: drawn from any log that has a step, whatever is missing in it."""

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from megatron_fleet.config.errors import UserError
from megatron_fleet.telemetry.curve import draw_learning_curve, running_mean, series
from megatron_fleet.telemetry.sinks import MetricsLog


def test_running_mean_equals_slices():
    values = np.random.default_rng(0).normal(size=17)
    expected = [values[max(0, i - 3) : i + 1].mean() for i in range(17)]
    assert running_mean(values, 4) == pytest.approx(expected)
    assert running_mean(values, 1) == pytest.approx(values)


def test_missing_values_are_skipped():
    steps, values = series([{"step": 1, "a": 2.0}, {"step": 2}, {"step": 3, "a": None}, {"step": 4, "a": 1.0}], "a")
    assert (steps.tolist(), values.tolist()) == ([1, 4], [2.0, 1.0])


@pytest.mark.parametrize(
    "rows",
    [
        [{"eval/all/pass_at_1": 0.1}],
        [{"other": 1.0}, {"reward/avg_raw_reward": 0.3}],
        [{"eval/all/pass_at_1": 0.1, "eval/all/greedy_pass_at_1": 0.2}]
        + [{"reward/avg_raw_reward": i - 3.0, "policy/policy_entropy": 0.5, "policy/grad_norm": 1.0} for i in range(9)],
    ],
)
def test_it_draws_partial_logs(tmp_path, rows):
    log = MetricsLog(tmp_path / "metrics.jsonl", None)
    for step, row in enumerate(rows):
        log.write(step, row)
    log.close()
    picture = tmp_path / "plots" / "curve.png"
    draw_learning_curve(tmp_path / "metrics.jsonl", picture, "run")
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 10_000


def test_an_empty_log_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"metrics\.jsonl: holds no step"):
        draw_learning_curve(tmp_path / "metrics.jsonl", tmp_path / "curve.png", "run")

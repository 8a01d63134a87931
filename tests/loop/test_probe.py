"""The probe tells an engine that has other weights from one that rounds differently."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_fleet.loop.engine_weights import SEQUENCES, TOKENS, compare, probe_data
from megatron_fleet.rollout.requests import RolloutFailed


def test_the_probe_is_the_same_every_time_and_fits_a_micro_batch():
    one, two = probe_data(500, 1000), probe_data(500, 1000)
    assert [d.token_ids.tolist() for d in one] == [d.token_ids.tolist() for d in two]
    assert [len(d) for d in one] == [TOKENS] * SEQUENCES
    assert all(d.token_ids.max() < 500 and not d.loss_mask[0] and d.loss_mask[1:].all() for d in one)
    assert sum(len(d) for d in probe_data(500, 70)) <= 70


def test_the_worst_engine_counts():
    expected = [np.array([0, -1, -2], np.float32), np.array([0, -3], np.float32)]
    close = [x - np.float32(0.01) * (x != 0) for x in expected]
    # The first position predicts nothing: what an engine says there is not looked at.
    close[0][0] = 9
    assert compare(expected, [expected, close], 0.1, 3) == pytest.approx(0.01, abs=1e-6)
    assert compare(expected, [], 0.1, 3) is None  # all engines have left


@pytest.mark.parametrize("wrong", [0.5, np.nan])
def test_an_engine_that_differs_ends_the_run(wrong):
    expected = [np.array([0, -1, -2], np.float32)]
    with pytest.raises(RolloutFailed, match=r"engine 1 .* version 3: .*probe_tolerance=0.1"):
        compare(expected, [expected, [expected[0] + np.float32(wrong)]], 0.1, 3)

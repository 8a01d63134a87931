"""Estimates and weights against their formulas written out, and what they are for: more groups with a signal."""

import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_fleet.config.sections.data import CurriculumConfig, MixtureConfig
from megatron_fleet.data.curriculum import SignalEstimate, has_signal, measured, signal_weights, streak_after

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from mixture import Policy, World, run

REWARD = st.sampled_from([0.0, 0.1, 0.5, 1.0])
GROUPS = st.lists(st.lists(REWARD, max_size=4), max_size=30)


@pytest.mark.parametrize(
    ("rewards", "wanted"),
    [
        ([], False),
        ([1.0], False),
        ([0.1, 0.1, 0.1], False),
        ([0.0, 0.0], False),
        ([0.0, 1.0], True),
        ([0.5, 0.4], True),
    ],
)
def test_signal(rewards, wanted):
    assert has_signal(rewards) is wanted


@given(GROUPS, st.floats(0.5, 50), st.floats(0, 1))
@settings(deadline=None, max_examples=60)
def test_estimates_are_weighted_means(groups, half_life, prior):
    """Unrolled: the newest of m measurements weighs α, the one before it α(1−α) …, the prior what is left."""
    estimate = SignalEstimate(prior)
    for group in groups:
        estimate = measured(estimate, group, half_life)
    known = [group for group in groups if len(group) >= 2]
    keep = 0.5 ** (1 / half_life)
    weights = [(1 - keep) * keep ** (len(known) - 1 - i) for i in range(len(known))]
    signal = prior * keep ** len(known) + sum(w * (len(set(g)) > 1) for w, g in zip(weights, known, strict=True))
    assert estimate.groups == len(known)
    assert estimate.signal == pytest.approx(signal)
    if known:
        weights[0] = keep ** (len(known) - 1)
        reward = sum(w * float(np.mean(g)) for w, g in zip(weights, known, strict=True))
        assert estimate.reward == pytest.approx(reward)
    else:
        assert estimate == SignalEstimate(prior)


def test_a_measurement_counts_half_after_the_half_life():
    estimate = SignalEstimate(1.0)
    for _ in range(16):
        estimate = measured(estimate, [0.0, 0.0], half_life=16)
    assert estimate.signal == pytest.approx(0.5)


def test_weights_by_hand():
    shares = {"live": 0.2, "half": 0.3, "dead": 0.5}
    weights = signal_weights(shares, {"live": 0.8, "half": 0.4, "dead": 0.0}, floor=0.1)
    raw = np.array([0.2 * 1.0, 0.3 * 0.55, 0.5 * 0.1])
    assert list(weights.values()) == pytest.approx(raw / raw.sum())
    assert signal_weights(shares, dict.fromkeys(shares, 0.0), floor=0.1) == shares


@given(st.lists(st.tuples(st.integers(1, 99), st.floats(0, 1)), min_size=1, max_size=9), st.floats(0.01, 1))
@settings(deadline=None, max_examples=60)
def test_weights_never_fall_below_the_floor_and_never_prefer_less_signal(envs, floor):
    total = sum(size for size, _ in envs)
    shares = {str(i): size / total for i, (size, _) in enumerate(envs)}
    signals = {str(i): signal for i, (_, signal) in enumerate(envs)}
    weights = signal_weights(shares, signals, floor)
    assert sum(weights.values()) == pytest.approx(1)
    factors = {env: weights[env] / shares[env] for env in shares}
    assert min(factors.values()) >= floor * (1 - 1e-9)
    for one in shares:
        for other in shares:
            if signals[one] > signals[other]:
                assert factors[one] >= factors[other] * (1 - 1e-9)


def test_streaks():
    assert streak_after(3, [1.0, 1.0]) == 4
    assert streak_after(3, [0.0, 0.0]) == 4
    assert streak_after(3, [0.0, 1.0]) == 0
    assert streak_after(3, [1.0]) == streak_after(3, []) == 3


WORLDS = {"dead": World(400, -9.0, 1.0), "live": World(100, 0.0, 1.0), "saturated": World(100, 9.0, 1.0)}


def informative_share(mixture, seeds=3):
    return np.mean([run(WORLDS, mixture, 0.0, seed, 60, 16, 8)[0] for seed in range(seeds)])


def test_fewer_prompts_are_wasted_on_dead_and_saturated_environments():
    """Proportional sampling against the expectation written out, and then the same with signal weights."""
    expected = []
    for seed in range(3):
        policy = Policy(WORLDS, 0.0, seed)
        chances = np.concatenate([policy.chances(env) for env in WORLDS])
        expected.append(np.mean(1 - chances**8 - (1 - chances) ** 8))
    plain = informative_share(MixtureConfig())
    assert plain == pytest.approx(np.mean(expected), abs=0.02)
    weighed = informative_share(
        MixtureConfig(curriculum=CurriculumConfig(signal_weights=True, floor=0.2, half_life=16))
    )
    # With the signals known, live : the others = 1 : 5 in tasks and 1 : 0.2 in weight, hence a half.
    assert 0.35 < weighed < 0.55
    assert weighed > 2 * plain


def test_deferral_passes_over_what_is_solved():
    """Half of an environment's tasks are solved for good: after two passes they are played every third time."""
    worlds = {"half": World(40, 0.0, 60.0)}
    plain, deferring = (
        np.mean(run(worlds, MixtureConfig(min_per_env=1, curriculum=c), 0.0, 3, 30, 8, 8)[0][12:])
        for c in (CurriculumConfig(), CurriculumConfig(defer_after=2, defer_passes=2))
    )
    assert deferring > 1.5 * plain > 0

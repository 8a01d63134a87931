"""Pass rates, intervals and the words for them, against independent arithmetic."""

import math

import numpy as np
import pytest
from run_maker import episode

from megatron_fleet.analysis.environments import FINE, RULES, Status, signals, status
from megatron_fleet.analysis.episodes import Episode
from megatron_fleet.analysis.statistics import Estimate, bootstrap_mean, change, interval, pass_rate, rate, value


def attempts(rates: dict[str, list[float | None]]) -> list[Episode]:
    return [episode(task=task, sample=i, reward=r) for task, own in rates.items() for i, r in enumerate(own)]


def test_unknown_rewards_are_in_no_rate():
    known = attempts({"a": [1.0, 0.0], "b": [1.0]})
    more = [*known, *attempts({"a": [None, None], "c": [None]})]
    assert pass_rate(more).value == pass_rate(known).value == (0.5 + 1.0) / 2
    assert pass_rate(more).tasks == 2
    assert pass_rate(attempts({"a": [None]})) is None


def test_the_mean_is_over_tasks_and_not_over_episodes():
    assert pass_rate(attempts({"a": [1.0] * 9, "b": [0.0]})).value == 0.5


@pytest.mark.parametrize(("n", "solved"), [(20, 6), (50, 40), (200, 10)])
def test_the_interval_of_zeros_and_ones_is_that_of_the_binomial_distribution(n, solved):
    p = solved / n
    cumulative = np.cumsum([math.comb(n, k) * p**k * (1 - p) ** (n - k) for k in range(n + 1)])
    expected = [int(np.searchsorted(cumulative, q)) / n for q in (0.025, 0.975)]
    found = bootstrap_mean(np.array([1.0] * solved + [0.0] * (n - solved)))
    assert found == pytest.approx(expected, abs=1.01 / n)


def test_an_interval_is_the_same_every_time_and_needs_two_tasks():
    values = np.array([0.0, 0.25, 1.0, 0.5])
    assert bootstrap_mean(values) == bootstrap_mean(values)
    assert bootstrap_mean(values[:1]) is None
    assert pass_rate(attempts({"a": [1.0]})) == Estimate(1.0, None, None, 1)


def test_a_change_is_paired_by_task():
    before = attempts({"easy": [1.0], "hard": [0.0], "gone": [0.0], "dark": [1.0]})
    after = attempts({"easy": [1.0], "hard": [1.0], "new": [1.0], "dark": [None]})
    delta = change(before, after)
    assert (delta.value, delta.tasks) == (0.5, 2)
    # The spread of the tasks' levels drops out: every task gained the same, so nothing is uncertain.
    first = attempts({f"t{i}": [float(i % 2), 0.0] for i in range(10)})
    last = attempts({f"t{i}": [float(i % 2), 1.0] for i in range(10)})
    assert change(first, last) == Estimate(0.5, 0.5, 0.5, 10)
    assert change(first, attempts({"other": [1.0]})) is None


@pytest.mark.parametrize(
    ("after", "delta", "expected"),
    [
        (None, None, Status.UNKNOWN),
        (0.40, (0.10, 0.01, 0.20, 9), Status.IMPROVED),
        (0.97, (0.10, 0.01, 0.20, 9), Status.IMPROVED),
        (0.40, (0.10, 0.00, 0.20, 9), Status.FLAT),
        (0.40, (0.10, 0.01, 0.20, 4), Status.UNCLEAR),
        (0.40, (-0.1, -0.2, -0.01, 9), Status.WORSE),
        (0.02, (-0.1, -0.2, -0.01, 9), Status.WORSE),
        (0.95, (0.00, -0.1, 0.10, 9), Status.SATURATED),
        (0.94, (0.00, -0.1, 0.10, 9), Status.FLAT),
        (0.05, (0.00, -0.1, 0.10, 9), Status.FAILING),
        (0.06, (0.00, -0.1, 0.10, 9), Status.FLAT),
        (0.50, None, Status.UNCLEAR),
        (1.00, None, Status.SATURATED),
    ],
)
def test_status(after, delta, expected):
    estimate = None if after is None else Estimate(after, None, None, 9)
    assert status(estimate, delta and Estimate(*delta)) is expected
    assert RULES.keys() == set(Status)


def rows(*steps: tuple[float | None, float | None, float | None]) -> list[dict]:
    names = ("avg_raw_reward", "variance_per_prompt", "signal_ratio")
    return [{"step": i, **{f"reward/e/{n}": v for n, v in zip(names, s, strict=True)}} for i, s in enumerate(steps)]


@pytest.mark.parametrize(
    ("ratios", "reward", "advice"),
    [
        ([0.5, 0.5, 0.0, 0.5], 0.3, FINE),
        ([0.9, 0.0, 0.0, 0.0], 0.3, "Thin: most of its prompts are never solved"),  # 25 % of the steps: just enough
        ([0.9, 0.0, 0.0, 0.0, 0.0], 0.2, "Too hard"),
        ([0.9, 0.0, 0.0, 0.0, 0.0], 0.5, "Too easy"),
        ([0.1, 0.1], 0.9, "Thin: most of its prompts are always solved"),
        ([0.25, 0.25], 0.9, FINE),
    ],
)
def test_advice(ratios, reward, advice):
    (signal,) = signals(rows(*((reward, 0.1, ratio) for ratio in ratios)))
    assert signal.advice.startswith(advice)
    assert signal.prompts_with_signal == pytest.approx(sum(ratios) / len(ratios))
    assert signal.steps_with_signal == sum(r > 0 for r in ratios) / len(ratios)


def test_a_step_without_two_known_rewards_is_neither_with_nor_without_signal():
    (signal,) = signals([*rows((0.5, 0.25, 1.0), (1.0, None, None)), {"step": 9}])
    assert (signal.steps, signal.steps_with_signal, signal.reward) == (1, 1.0, 0.5)
    assert signals([]) == []


def test_a_zero_that_was_rounded_has_no_sign():
    nothing = Estimate(-1e-17, -4e-4, 6e-4, 9)
    assert rate(nothing, signed=True) == "+0.000 [+0.000, +0.001]"
    assert (rate(nothing), value(nothing), interval(nothing)) == ("0.000 [0.000, 0.001]", "0.000", "[0.000, 0.001]")
    assert rate(Estimate(-0.25, -0.5, 0.0, 9), signed=True) == "-0.250 [-0.500, +0.000]"

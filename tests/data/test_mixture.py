"""Shares, minimum and whole prompts: the formulas, and the bounds that the quota method promises."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_fleet.config.errors import UserError
from megatron_fleet.config.sections.data import MixtureConfig
from megatron_fleet.data.mixture import check_mixture, env_shares, env_sizes, quotas, with_minimum
from megatron_fleet.data.task import Task

SIZES = {"big": 4096, "mid": 256, "one": 1}
NOISE = 1e-6
"""Rounding of sums of floats over some hundred prompts."""
SEVERAL = st.lists(st.integers(1, 5000), min_size=1, max_size=12)


def tasks(sizes):
    return [Task(f"{env}{i}", "p", env, "v") for env, size in sizes.items() for i in range(size)]


@pytest.mark.parametrize(
    ("mixture", "weights"),
    [
        (MixtureConfig(), (4096, 256, 1)),
        (MixtureConfig(weights="temperature", temperature=1.0), (4096, 256, 1)),
        (MixtureConfig(weights="temperature", temperature=2.0), (64, 16, 1)),
        (MixtureConfig(weights="temperature", temperature=4.0), (8, 4, 1)),
        (MixtureConfig(weights="uniform"), (1, 1, 1)),
        (MixtureConfig(weights="explicit", shares={"one": 3.0, "mid": 0.0, "big": 1.0}), (1, None, 3)),
    ],
)
def test_shares(mixture, weights):
    total = sum(weight or 0 for weight in weights)
    wanted = {env: w / total for env, w in zip(SIZES, weights, strict=True) if w is not None}
    assert env_shares(SIZES, mixture) == pytest.approx(wanted)


def test_sizes_count_the_real_environment():
    assert env_sizes([Task("a", "p", "y", "v"), Task("b", "p", "x", "v"), Task("c", "p", "y", "v")]) == {"x": 1, "y": 2}


@pytest.mark.parametrize(
    ("mixture", "words"),
    [
        (
            MixtureConfig(min_per_env=4),
            ["min_per_env=4", "3 environments", "12 prompts", "prompts_per_step=10", "at most 3"],
        ),
        (
            MixtureConfig(weights="explicit", shares={"big": 1, "mid": 1, "one": 1, "gone": 1}),
            ["gone", "big, mid, one"],
        ),
        (MixtureConfig(weights="explicit", shares={"big": 1}), ["does not name mid, one", "0 leaves it out"]),
        (MixtureConfig(weights="explicit", shares=dict.fromkeys(SIZES, 0)), ["every environment"]),
    ],
)
def test_what_does_not_fit_is_explained(mixture, words):
    with pytest.raises(UserError) as caught:
        check_mixture(tasks(SIZES), 10, mixture)
    assert [word for word in words if word not in str(caught.value)] == []


def test_the_minimum_is_of_environments_that_take_part():
    two = MixtureConfig(weights="explicit", shares={"big": 1, "mid": 1, "one": 0}, min_per_env=5)
    check_mixture(tasks(SIZES), 10, two)
    check_mixture(tasks(SIZES), 12, MixtureConfig(min_per_env=4))
    with pytest.raises(UserError, match="needs 12 prompts"):
        check_mixture(tasks(SIZES), 11, MixtureConfig(min_per_env=4))


@given(SEVERAL, st.floats(0, 1))
@settings(deadline=None, max_examples=60)
def test_minimum_raises_the_small_and_keeps_the_proportions_of_the_others(weights, part):
    shares = np.array(weights) / sum(weights)
    least = part / len(shares)
    raised = with_minimum(shares, least)
    assert raised.sum() == pytest.approx(1)
    assert (raised >= least - NOISE).all()
    above = raised > least + NOISE
    ratios = raised[above] / shares[above]
    assert ratios == pytest.approx(np.full(above.sum(), ratios[0] if above.any() else 1.0))
    assert (ratios <= 1 + NOISE).all()


@given(SEVERAL, st.integers(1, 20), st.integers(1, 40), st.integers(0, 3))
@settings(deadline=None, max_examples=60)
def test_fixed_shares_are_met_to_less_than_a_prompt_at_every_step(weights, batch, steps, least):
    """Against exact fractions: what an environment got in all is its entitlement rounded down or up."""
    batch = max(batch, least * len(weights))
    floor = Fraction(least, batch)
    shares = with_minimum(np.array(weights) / sum(weights), float(floor))
    exact = exact_minimum([Fraction(w, sum(weights)) for w in weights], floor)
    assert shares == pytest.approx([float(share) for share in exact], abs=1e-12)
    credit, total = np.zeros(len(shares)), np.zeros(len(shares), dtype=int)
    for step in range(1, steps + 1):
        counts, credit = quotas(shares, credit, batch, least)
        assert counts.sum() == batch
        assert (counts >= least).all()
        total += counts
        wanted = [step * batch * share for share in exact]
        assert all(abs(got - want) < 1 for got, want in zip(total.tolist(), wanted, strict=True)), (total, wanted)
        assert credit == pytest.approx([float(want - got) for got, want in zip(total.tolist(), wanted, strict=True)])


def exact_minimum(shares, least):
    """The definition, in fractions: the smallest are raised first, the others share what is left."""
    order = sorted(range(len(shares)), key=lambda i: shares[i])
    for raised in range(len(shares) + 1):
        free = sum(shares[i] for i in order[raised:])
        scale = (1 - least * raised) / free if free else 0
        if all(shares[i] * scale >= least for i in order[raised:]):
            low = set(order[:raised])
            return [least if i in low else shares[i] * scale for i in range(len(shares))]
    raise AssertionError


@given(st.lists(st.lists(st.floats(0.01, 1), min_size=5, max_size=5), min_size=1, max_size=60), st.integers(1, 7))
@settings(deadline=None, max_examples=60)
def test_shares_that_change_keep_everyone_less_than_a_prompt_ahead(weights, batch):
    credit, got, wanted = np.zeros(5), np.zeros(5), np.zeros(5)
    for row in weights:
        shares = np.array(row) / sum(row)
        counts, credit = quotas(shares, credit, batch, 0)
        got, wanted = got + counts, wanted + batch * shares
        assert credit == pytest.approx(wanted - got, abs=NOISE)
        assert credit.sum() == pytest.approx(0, abs=NOISE)
        assert (credit > -1).all()
        assert (credit < 4).all()


def test_nothing_is_left_to_share_out_when_the_minimum_takes_the_step():
    counts, credit = quotas(np.full(3, 1 / 3), np.zeros(3), 6, 2)
    assert counts.tolist() == [2, 2, 2]
    assert credit.tolist() == [0, 0, 0]

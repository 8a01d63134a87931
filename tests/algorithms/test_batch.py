"""Training rows: scale, content, and an account that adds up for any mixture of rewards."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_fleet.agents.trajectory import Group, Outcome, Span, Trajectory
from megatron_fleet.algorithms.advantages import ADVANTAGES
from megatron_fleet.algorithms.batch import Fate, Origin, build_data, split_batch
from megatron_fleet.config.schema import Algorithm


def trajectory(reward: float | None, mask: str = "..##.#", sample: int = 0) -> Trajectory:
    """``#`` = action token."""
    action = np.array([c == "#" for c in mask])
    tokens = np.arange(len(mask), dtype=np.int32) + 100
    logprobs = np.where(action, -0.25 * np.arange(1, len(mask) + 1), 0).astype(np.float32)
    spans = (Span("prompt", 0, len(mask), 0),)
    return Trajectory("t", "e", 0, sample, tokens, action, logprobs, spans, reward, "", Outcome.COMPLETED)


def group(*rewards: float | None, masks: tuple[str, ...] = ()) -> Group:
    masks = masks or ("..##.#",) * len(rewards)
    return Group(0, "t", "e", [trajectory(r, m, i) for i, (r, m) in enumerate(zip(rewards, masks, strict=True))])


masks = st.text("#.", min_size=1, max_size=8)
episodes = st.tuples(st.one_of(st.none(), st.sampled_from([0.0, 0.5, 1.0, float("nan")])), masks)


@given(
    st.lists(st.lists(episodes, max_size=5), max_size=5),
    st.sampled_from(sorted(ADVANTAGES)),
    st.sampled_from(["token_mean", "sequence_mean", "constant"]),
    st.booleans(),
)
def test_every_trajectory_has_one_fate(rows, advantage, reduction, filtered):
    groups = [group(*(r for r, _ in row), masks=tuple(m for _, m in row)) for row in rows]
    batch = build_data(groups, Algorithm(advantage=advantage, reduction=reduction, filter_zero_signal=filtered))
    assert [len(f) for f in batch.fates] == [len(row) for row in rows]
    assert sum(batch.counts.values()) == sum(map(len, rows))
    assert batch.counts[Fate.TRAINED] == len(batch.data) == len(batch.origin) == len(batch.advantages)
    assert len(set(batch.origin)) == len(batch.origin)
    for origin, datum in zip(batch.origin, batch.data, strict=True):
        source = groups[origin.group].trajectories[origin.sample]
        assert batch.fates[origin.group][origin.sample] is Fate.TRAINED
        assert np.array_equal(datum.token_ids, source.token_ids)  # nothing truncated
        assert set(np.flatnonzero(datum.mask)) == set(np.flatnonzero(source.action_mask)) - {0}
        assert source.reward in (0.0, 0.5, 1.0)
    assert batch.trained_tokens == sum(np.count_nonzero(d.mask) for d in batch.data)


def test_fates_by_hand():
    rows = [group(1, 0, None), group(1, 1), group(None, 0, None), group(1, 0, masks=("..", "##"))]
    t, z, u, f, n = Fate.TRAINED, Fate.ZERO_SIGNAL, Fate.UNKNOWN, Fate.TOO_FEW_KNOWN, Fate.NO_TOKENS
    assert build_data(rows, Algorithm()).fates == [[t, t, u], [z, z], [u, f, u], [n, t]]
    kept = build_data(rows, Algorithm(filter_zero_signal=False))
    assert kept.fates[1] == [t, t]
    equal = [d for d, o in zip(kept.data, kept.origin, strict=True) if o.group == 1]
    assert all(not d.weights.any() and d.mask.any() for d in equal)


def test_rows_by_hand():
    batch = build_data([group(1, 0, masks=("..##.#", ".#"))], Algorithm(advantage="grpo_no_std"))
    first, second = batch.data
    assert first.mask.tolist() == [0, 0, 0.25, 0.25, 0, 0.25]  # 3 + 1 trained tokens
    assert first.weights.tolist() == [0, 0, 0.125, 0.125, 0, 0.125]  # advantage 0.5
    assert second.weights.tolist() == [0, -0.125]
    assert first.behaviour_logprobs.tolist() == [0, 0, -0.75, -1.0, 0, -1.5]
    assert batch.origin == [Origin(0, 0), Origin(0, 1)]
    assert first.proximal_logprobs is first.reference_logprobs is None
    assert (first.token_ids.dtype, first.mask.dtype, first.weights.dtype) == (np.int32, np.float32, np.float32)


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean", "constant"])
def test_normalisers(reduction):
    groups = [group(1, 0, masks=("." + "#" * 9, ".#")), group(1, 1), group(0, 1, masks=(".##", ".####"))]
    batch = build_data(groups, Algorithm(reduction=reduction, reduction_constant=10))
    assert len(batch.data) == 4  # the zero-signal group does not dilute
    row_sums = [float(d.mask.sum()) for d in batch.data]
    expected = {
        "token_mean": [9 / 16, 1 / 16, 2 / 16, 4 / 16],
        "sequence_mean": [1 / 4] * 4,
        "constant": [9 / 40, 1 / 40, 2 / 40, 4 / 40],
    }
    assert row_sums == pytest.approx(expected[reduction], rel=1e-6)


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean", "constant"])
def test_each_part_of_a_split_is_normalised_over_itself(reduction):
    algo = Algorithm(reduction=reduction, reduction_constant=10)
    groups = [group(1, 0, masks=("." + "#" * 9, ".#")), group(0, 1, 0.5, masks=(".##", ".####", ".#"))]
    batch = build_data(groups, algo)
    parts = split_batch(batch, 2, algo)
    assert [len(d) for p in parts for d in p] == [len(d) for d in batch.data]
    for part in parts:
        tokens = sum(np.count_nonzero(d.mask) for d in part)
        scale = tokens / (10 * len(part)) if reduction == "constant" else 1
        assert sum(float(d.mask.sum()) for d in part) == pytest.approx(scale, rel=1e-6)
    rejoined = [d.weights[d.mask > 0] / d.mask[d.mask > 0] for p in parts for d in p]
    for weights, advantage in zip(rejoined, batch.advantages, strict=True):
        assert weights == pytest.approx(advantage, rel=1e-5)


def test_a_split_has_no_empty_part():
    algo = Algorithm()
    batch = build_data([group(1, 0)], algo)
    assert [len(p) for p in split_batch(batch, 5, algo)] == [1, 1]
    assert split_batch(build_data([], algo), 2, algo) == []


def test_the_first_token_is_never_trained():
    batch = build_data([group(1, 0, masks=("##", "##"))], Algorithm())
    assert [d.mask[0] for d in batch.data] == [0, 0]
    assert [d.behaviour_logprobs[0] for d in batch.data] == [0, 0]

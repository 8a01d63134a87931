"""Training sequences: scale, content, and an account that adds up for any mixture of rewards."""

from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_fleet.agents.trajectory import Group, Outcome, Span, Trajectory
from megatron_fleet.algorithms.advantages import ADVANTAGES
from megatron_fleet.algorithms.batch import Batch, Fate, Origin, build_data, split_batch
from megatron_fleet.algorithms.datum import Datum
from megatron_fleet.algorithms.groups import FILTERS
from megatron_fleet.config.schema import AlgorithmConfig
from megatron_fleet.config.sections.algorithm import CutShort


def trajectory(reward: float | None, mask: str = "..##.#", sample: int = 0) -> Trajectory:
    """``#`` = action token; ``|`` begins another segment."""
    parts = mask.split("|")
    starts = tuple(sum(map(len, parts[:i])) for i in range(len(parts)))
    mask = "".join(parts)
    action = np.array([c == "#" for c in mask], bool)
    tokens = np.arange(len(mask), dtype=np.int32) + 100
    logprobs = np.where(action, -0.25 * np.arange(1, len(mask) + 1), 0).astype(np.float32)
    spans = (Span("prompt", 0, len(mask), 0),)
    return Trajectory(
        "t", "e", 0, sample, tokens, action, logprobs, spans, reward, "", Outcome.COMPLETED, segment_starts=starts
    )


def group(*rewards: float | None, masks: tuple[str, ...] = ()) -> Group:
    masks = masks or ("..##.#",) * len(rewards)
    return Group(0, "t", "e", [trajectory(r, m, i) for i, (r, m) in enumerate(zip(rewards, masks, strict=True))])


def scaled(batch: Batch, algo: AlgorithmConfig) -> list[Datum]:
    """The data of a step with one update."""
    (part,) = split_batch(batch, 1, algo)
    return part


def weight(datum: Datum) -> float:
    """Sum of the normaliser over the trained tokens."""
    return float(datum.loss_mask.sum()) * datum.loss_scale


masks = st.lists(st.text("#.", min_size=1, max_size=6), min_size=1, max_size=3).map("|".join)
episodes = st.tuples(st.one_of(st.none(), st.sampled_from([0.0, 0.5, 1.0, float("nan")])), masks)


@given(
    st.lists(st.lists(episodes, max_size=5), max_size=5),
    st.sampled_from(sorted(ADVANTAGES)),
    st.sampled_from(["token_mean", "sequence_mean", "constant"]),
    st.sampled_from(sorted(FILTERS)),
)
def test_every_trajectory_has_one_fate(rows, advantage, reduction, filtered):
    groups = [group(*(r for r, _ in row), masks=tuple(m for _, m in row)) for row in rows]
    batch = build_data(groups, AlgorithmConfig(advantage=advantage, reduction=reduction, group_filter=filtered))
    assert [len(f) for f in batch.fates] == [len(row) for row in rows]
    assert sum(batch.counts.values()) == sum(map(len, rows))
    assert len(batch.data) == len(batch.origin) == len(batch.advantages) == len(set(batch.origin))
    assert batch.counts[Fate.TRAINED] == len({(o.group, o.sample) for o in batch.origin})
    assert batch.origin == sorted(batch.origin, key=lambda o: (o.group, o.sample, o.segment))
    for origin, datum in zip(batch.origin, batch.data, strict=True):
        source = groups[origin.group].trajectories[origin.sample]
        part = source.segments()[origin.segment]
        assert batch.fates[origin.group][origin.sample] is Fate.TRAINED
        assert np.array_equal(datum.token_ids, source.token_ids[part])  # nothing truncated
        assert set(np.flatnonzero(datum.loss_mask)) == set(np.flatnonzero(source.action_mask[part])) - {0}
        assert source.reward in (0.0, 0.5, 1.0)
    assert batch.trained_tokens == sum(np.count_nonzero(d.loss_mask) for d in batch.data)
    assert batch.trained_tokens == sum(
        int(t.action_mask[part][1:].sum())
        for g, group_fates in zip(groups, batch.fates, strict=True)
        for t, fate in zip(g.trajectories, group_fates, strict=True)
        if fate is Fate.TRAINED
        for part in t.segments()
    )


def test_fates_by_hand():
    groups = [group(1, 0, None), group(1, 1), group(None, 0, None), group(1, 0, masks=("..", "##"))]
    t, z, u, f, n = Fate.TRAINED, Fate.FILTERED, Fate.UNKNOWN, Fate.TOO_FEW_KNOWN, Fate.NO_TOKENS
    assert build_data(groups, AlgorithmConfig()).fates == [[t, t, u], [z, z], [u, f, u], [n, t]]
    kept = build_data(groups, AlgorithmConfig(group_filter="none"))
    assert kept.fates[1] == [t, t]
    equal = [d for d, o in zip(kept.data, kept.origin, strict=True) if o.group == 1]
    assert all(not d.scaled_advantages.any() and d.loss_mask.any() for d in equal)


def test_an_episode_that_was_cut_short_counts_for_its_group_and_trains_nothing():
    cut, whole = group(1, 0, 0, 1), group(1, 0, 0, 1)
    cut.trajectories[1].outcome = Outcome.CONTEXT_OVERFLOW
    cut.trajectories[3].outcome = Outcome.MAX_TURNS
    batch = build_data([cut], AlgorithmConfig())
    assert batch.fates == [[Fate.TRAINED, Fate.MASKED, Fate.TRAINED, Fate.TRAINED]]
    everything = build_data([whole], AlgorithmConfig(masked_outcomes=()))
    assert everything.fates == [[Fate.TRAINED] * 4] == build_data([cut], AlgorithmConfig(masked_outcomes=())).fates
    # The same baseline, and a normaliser of what is trained.
    assert batch.advantages == [everything.advantages[i] for i in (0, 2, 3)]
    assert sum(map(weight, scaled(batch, AlgorithmConfig()))) == pytest.approx(1) and batch.trained_tokens == 9
    assert build_data([cut], AlgorithmConfig(masked_outcomes=("max_turns",))).counts[Fate.MASKED] == 1


def test_masked_outcomes_are_outcomes_with_a_verdict():
    assert set(get_args(CutShort)) <= {str(outcome) for outcome in Outcome}


def test_data_by_hand():
    algo = AlgorithmConfig(advantage="grpo_no_std")
    batch = build_data([group(1, 0, masks=("..##.#", ".#"))], algo)
    assert [d.scaled_advantages.tolist() for d in batch.data] == [[0, 0, 0.5, 0.5, 0, 0.5], [0, -0.5]]
    assert [d.loss_scale for d in batch.data] == [1, 1]
    first, second = scaled(batch, algo)
    assert first.loss_mask.tolist() == [False, False, True, True, False, True]
    assert first.loss_scale == second.loss_scale == 0.25  # 3 + 1 trained tokens
    assert first.scaled_advantages.tolist() == [0, 0, 0.125, 0.125, 0, 0.125]  # advantage 0.5
    assert second.scaled_advantages.tolist() == [0, -0.125]
    assert first.behaviour_logprobs.tolist() == [0, 0, -0.75, -1.0, 0, -1.5]
    assert batch.origin == [Origin(0, 0), Origin(0, 1)]
    assert first.arrays == first.extras == {}
    types = (first.token_ids.dtype, first.loss_mask.dtype, first.scaled_advantages.dtype)
    assert types == (np.int32, np.bool_, np.float32)


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean", "constant"])
def test_normalisers(reduction):
    groups = [group(1, 0, masks=("." + "#" * 9, ".#")), group(1, 1), group(0, 1, masks=(".##", ".####"))]
    algo = AlgorithmConfig(reduction=reduction, reduction_constant=10)
    data = scaled(build_data(groups, algo), algo)
    assert len(data) == 4  # the zero-signal group does not dilute
    sums = [weight(d) for d in data]
    expected = {
        "token_mean": [9 / 16, 1 / 16, 2 / 16, 4 / 16],
        "sequence_mean": [1 / 4] * 4,
        "constant": [9 / 40, 1 / 40, 2 / 40, 4 / 40],
    }
    assert sums == pytest.approx(expected[reduction], rel=1e-6)


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean", "constant"])
def test_each_part_of_a_split_is_normalised_over_itself(reduction):
    algo = AlgorithmConfig(reduction=reduction, reduction_constant=10)
    groups = [group(1, 0, masks=("." + "#" * 9, ".#")), group(0, 1, 0.5, masks=(".##", ".####", ".#"))]
    batch = build_data(groups, algo)
    parts = split_batch(batch, 2, algo)
    assert [len(d) for p in parts for d in p] == [len(d) for d in batch.data]
    for part in parts:
        tokens = sum(np.count_nonzero(d.loss_mask) for d in part)
        scale = tokens / (10 * len(part)) if reduction == "constant" else 1
        assert sum(map(weight, part)) == pytest.approx(scale, rel=1e-6)
    rejoined = [d.scaled_advantages[d.loss_mask] / d.loss_scale for p in parts for d in p]
    for weights, advantage in zip(rejoined, batch.advantages, strict=True):
        assert weights == pytest.approx(advantage, rel=1e-5)


def weights_of(data, origins) -> dict[tuple[int, int], float]:
    """Per trajectory the sum of its sequences' weights."""
    out: dict[tuple[int, int], float] = {}
    for datum, origin in zip(data, origins, strict=True):
        key = (origin.group, origin.sample)
        out[key] = out.get(key, 0.0) + float(datum.scaled_advantages.sum())
    return out


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean", "constant"])
def test_a_trajectory_weighs_the_same_in_one_piece_and_in_many(reduction):
    algo = AlgorithmConfig(reduction=reduction, reduction_constant=10)
    whole = build_data([group(1, 0, 0.5, masks=("..##.##.#", ".###", "..#"))], algo)
    parts = build_data([group(1, 0, 0.5, masks=("..##|...##|..|....#", ".###", "..#"))], algo)
    assert (len(whole.data), len(parts.data), parts.counts[Fate.TRAINED]) == (3, 5, 3)
    assert [o.segment for o in parts.origin] == [0, 1, 3, 0, 0]  # nothing was sampled in segment 2
    assert parts.advantages[:3] == [whole.advantages[0]] * 3
    one, many = scaled(whole, algo), scaled(parts, algo)
    assert weights_of(many, parts.origin) == pytest.approx(weights_of(one, whole.origin), rel=1e-6)
    assert len({d.loss_scale for d in many[:3]}) == 1  # every token of a trajectory weighs the same
    assert parts.trained_tokens == whole.trained_tokens == 9


def test_segments_by_hand():
    algo = AlgorithmConfig(advantage="grpo_no_std")
    batch = build_data([group(1, 0, masks=("..##|.#", ".#"))], algo)
    first, second, third = scaled(batch, algo)
    assert first.token_ids.tolist() == [100, 101, 102, 103] and second.token_ids.tolist() == [104, 105]
    assert second.loss_mask.tolist() == [False, True] and second.behaviour_logprobs.tolist() == [0, -1.5]
    assert third.scaled_advantages.tolist() == [0, -0.125]
    assert batch.origin == [Origin(0, 0, 0), Origin(0, 0, 1), Origin(0, 1, 0)]


def test_experts_go_with_their_segment():
    one, other = trajectory(1.0, "..#|.##|.."), trajectory(0.0, sample=1)
    one.routing = np.arange(2 * 8, dtype=np.uint8).reshape(8, 1, 2)
    first, second, third = build_data([Group(0, "t", "e", [one, other])], AlgorithmConfig()).data
    assert first.extras["routing"].tolist() == one.routing[:3].tolist()
    assert second.extras["routing"].tolist() == one.routing[3:6].tolist()
    assert third.extras == {}


def test_nothing_predicts_the_first_token_of_a_segment():
    batch = build_data([group(1, 0, masks=("##|##", ".#|#"))], AlgorithmConfig())
    assert [np.flatnonzero(d.loss_mask).tolist() for d in batch.data] == [[1], [1], [1]]
    assert build_data([group(1, 0, masks=("#|#", ".#"))], AlgorithmConfig()).fates == [[Fate.NO_TOKENS, Fate.TRAINED]]


@pytest.mark.parametrize("parts", [1, 2, 3, 9])
def test_a_split_keeps_the_segments_of_a_trajectory_together(parts):
    algo = AlgorithmConfig(reduction="sequence_mean")
    batch = build_data([group(1, 0, 0.5, masks=("..#|..#|..#|..#", ".#|.##", "..#"))], algo)
    split = split_batch(batch, parts, algo)
    assert len(split) == min(parts, 3)
    sizes = [len(part) for part in split]
    assert sizes == {1: [7], 2: [4, 3], 3: [4, 2, 1], 9: [4, 2, 1]}[parts]
    for part in split:
        assert sum(map(weight, part)) == pytest.approx(1, rel=1e-6)


def test_a_trajectory_without_tokens_is_counted():
    empty = trajectory(0.0, "")
    batch = build_data([Group(0, "t", "e", [trajectory(1.0), trajectory(0.5, sample=1), empty])], AlgorithmConfig())
    assert batch.fates == [[Fate.TRAINED, Fate.TRAINED, Fate.NO_TOKENS]]


def test_a_split_has_no_empty_part():
    algo = AlgorithmConfig()
    batch = build_data([group(1, 0)], algo)
    assert [len(p) for p in split_batch(batch, 5, algo)] == [1, 1]
    assert split_batch(build_data([], algo), 2, algo) == []


def test_the_first_token_is_never_trained():
    batch = build_data([group(1, 0, masks=("##", "##"))], AlgorithmConfig())
    assert [d.loss_mask[0] for d in batch.data] == [False, False]
    assert [d.behaviour_logprobs[0] for d in batch.data] == [0, 0]


def test_every_trained_token_knows_how_many_versions_ago_it_was_sampled():
    played = group(1, 0, masks=("..####", "..#"))
    spans = (Span("action", 2, 4, 0, 3), Span("action", 4, 5, 0, 5), Span("action", 5, 6, 1, 6))
    played.trajectories[0].spans = (Span("prompt", 0, 2, 0), *spans)
    played.trajectories[1].spans = (Span("prompt", 0, 2, 0), Span("action", 2, 3, 0, 6))
    old, new = build_data([played], AlgorithmConfig(), version=6).data
    assert old.arrays["staleness"].tolist() == [0, 0, 3, 3, 1, 0]
    assert new.arrays["staleness"].tolist() == [0, 0, 0]
    assert all(datum.arrays == {} for datum in build_data([played], AlgorithmConfig()).data)

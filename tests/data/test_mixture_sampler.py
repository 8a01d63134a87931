"""The mixture sampler: exact resume, whole passes, minimum, no starvation, nothing that depends on the file's order."""

import json
import random
from collections import Counter
from math import ceil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_fleet.config.errors import UserError
from megatron_fleet.config.sections.data import CurriculumConfig, MixtureConfig
from megatron_fleet.data.sampler import MixtureSampler, Passes, PromptSampler, make_sampler
from megatron_fleet.data.task import Task

ADAPTIVE = CurriculumConfig(signal_weights=True, floor=0.25, half_life=4, defer_after=2, defer_passes=2)
SIZES = st.lists(st.integers(1, 30), min_size=1, max_size=6)


def tasks(sizes):
    return [Task(f"{env}-{i}", "p", f"env{env}", "v") for env, size in enumerate(sizes) for i in range(size)]


def keys(batch):
    return [task.key for task in batch]


def rewards(key, step):
    """Rewards of a made-up policy: some environments always solved, some never, some now and then, some unknown."""
    env = int(key.split("-")[0])
    rng = random.Random(f"{step}/{key}")
    return [float(rng.random() < (1.0, 0.0, 0.5, 0.1)[env % 4]) for _ in range(rng.randrange(5))]


def play(sampler, steps, start=0):
    batches = []
    for step in range(start, start + steps):
        batches.append(keys(sampler.next()))
        sampler.observe([(key, rewards(key, step)) for key in batches[-1]])
    return batches


@st.composite
def samplers(draw):
    """(sizes, batch, mixture) that fit together."""
    sizes = draw(SIZES)
    least = draw(st.integers(0, 2))
    batch = draw(st.integers(max(1, least * len(sizes)), 40))
    kind = draw(st.sampled_from(["proportional", "temperature", "uniform", "explicit"]))
    return sizes, batch, MixtureConfig(
        weights=kind,
        temperature=draw(st.floats(0.5, 8)) if kind == "temperature" else None,
        shares={f"env{i}": draw(st.floats(0.1, 5)) for i in range(len(sizes))} if kind == "explicit" else {},
        min_per_env=least,
        curriculum=draw(st.sampled_from([CurriculumConfig(), ADAPTIVE])),
    )  # fmt: skip


@given(samplers(), st.integers(0, 8), st.randoms(use_true_random=False))
@settings(max_examples=25, deadline=None)
def test_a_resumed_run_plays_what_a_straight_one_does(given_sampler, steps, chance):
    sizes, batch, mixture = given_sampler
    straight = MixtureSampler(tasks(sizes), batch, 7, mixture)
    play(straight, steps)
    state = json.loads(json.dumps(straight.state_dict()))
    shuffled = tasks(sizes)
    chance.shuffle(shuffled)
    resumed = MixtureSampler(shuffled, batch, 7, mixture)
    resumed.load_state_dict(state)
    assert play(resumed, 8, start=steps) == play(straight, 8, start=steps)
    assert resumed.state_dict() == straight.state_dict()
    assert resumed.status() == straight.status()


@given(samplers())
@settings(max_examples=25, deadline=None)
def test_no_task_comes_twice_before_its_environment_has_played_them_all(given_sampler):
    sizes, batch, mixture = given_sampler
    mixture = mixture.model_copy(update={"curriculum": CurriculumConfig(signal_weights=True)})
    drawn = [key for one in play(MixtureSampler(tasks(sizes), batch, 7, mixture), 12) for key in sorted(one)]
    for env, size in enumerate(sizes):
        counts = Counter(key for key in drawn if key.startswith(f"{env}-"))
        times = [counts[f"{env}-{i}"] for i in range(size)]
        assert max(times) - min(times) <= 1


@given(samplers())
@settings(max_examples=25, deadline=None)
def test_minimum_and_mix(given_sampler):
    """Every environment gets its minimum; with shares that do not change the whole run is within a prompt of them."""
    sizes, batch, mixture = given_sampler
    sampler = MixtureSampler(tasks(sizes), batch, 7, mixture)
    total, wanted = Counter(), Counter()
    for step in range(10):
        (one,) = play(sampler, 1, start=step)
        assert len(one) == batch
        counts = Counter(f"env{key.split('-')[0]}" for key in one)
        assert min(counts[f"env{i}"] for i in range(len(sizes))) >= mixture.min_per_env
        status = sampler.status()
        total.update(counts)
        wanted.update({env: weight * batch for env, weight in status["weight"].items()})
    most = len(sizes) if mixture.curriculum.signal_weights else 1
    assert all(-most < total[env] - wanted[env] < 1 for env in wanted)
    assert status["mix_total"] == {env: total[env] / (10 * batch) for env in wanted}


@given(SIZES, st.integers(1, 20), st.sampled_from(["proportional", "uniform"]))
@settings(max_examples=25, deadline=None)
def test_no_environment_starves(sizes, batch, weights):
    """Credit grows by at least batch × floor × share a step from above −1, and stays below the number of others."""
    mixture = MixtureConfig(weights=weights, curriculum=ADAPTIVE)
    sampler = MixtureSampler(tasks(sizes), batch, 7, mixture)
    shares = sampler.status()["weight"]
    longest = {env: ceil(len(sizes) / (batch * ADAPTIVE.floor * share)) for env, share in shares.items()}
    waited = Counter()
    for step in range(40):
        seen = {f"env{key.split('-')[0]}" for key in play(sampler, 1, start=step)[0]}
        for env, bound in longest.items():
            waited[env] = 0 if env in seen else waited[env] + 1
            assert waited[env] <= bound


def test_the_seed_decides_orders_and_nothing_else():
    mixture = MixtureConfig(weights="uniform")
    one, two, three = (MixtureSampler(tasks([9, 9]), 6, seed, mixture) for seed in (1, 1, 2))
    first = play(one, 3)
    assert first == play(two, 3) != play(three, 3)
    assert one.status() == three.status()
    places = [[key[0] for key in batch] for batch in first]
    assert sorted(places[0]) == ["0"] * 3 + ["1"] * 3 != places[0]
    assert places[0] != places[1] or places[1] != places[2]


def test_environments_do_not_share_an_order():
    one, two = (Passes(env, tasks([20]), 7).take(40) for env in ("one", "two"))
    assert sorted(keys(one)) == sorted(keys(two))
    assert keys(one[:20]) != keys(two[:20]) != keys(two[20:])


def test_left_out_environments_are_never_played():
    mixture = MixtureConfig(weights="explicit", shares={"env0": 0, "env1": 1, "env2": 3})
    batches = play(MixtureSampler(tasks([50, 5, 5]), 4, 7, mixture), 5)
    assert Counter(key[0] for batch in batches for key in batch) == {"1": 5, "2": 15}


def test_saturated_and_dead_environments_are_measured_less():
    mixture = MixtureConfig(
        weights="uniform", curriculum=CurriculumConfig(signal_weights=True, floor=0.25, half_life=4)
    )
    sampler = MixtureSampler(tasks([30, 30, 30]), 12, 7, mixture)
    play(sampler, 40)
    status = sampler.status()
    floor, best = 0.25 / 1.5, 1 / 1.5
    assert status["weight"] == pytest.approx({"env0": floor, "env1": floor, "env2": best}, abs=0.01)
    assert status["reward"]["env0"] == 1
    assert status["reward"]["env1"] == 0
    assert 0.2 < status["reward"]["env2"] < 0.8
    assert status["mix_total"]["env2"] > 0.5


def test_unknown_rewards_teach_nothing():
    sampler = MixtureSampler(tasks([5, 5]), 4, 7, MixtureConfig(curriculum=ADAPTIVE))
    before = sampler.state_dict()
    sampler.observe([(task.key, known) for task in tasks([5, 5]) for known in ([], [1.0])])
    assert sampler.state_dict() == before


def test_tasks_without_signal_are_deferred_and_come_back():
    """Pass 0 and 1 measure; 2 groups in a row without signal leave a task out of 2 passes, then one more is enough."""
    mixture = MixtureConfig(curriculum=CurriculumConfig(defer_after=2, defer_passes=2))
    sampler = MixtureSampler(tasks([3]), 1, 7, mixture)
    signal = {"0-0": [1.0, 0.0], "0-1": [1.0, 1.0], "0-2": [0.0, 0.0]}
    drawn, left_out = [], []
    for _ in range(14):
        (task,) = sampler.next()
        sampler.observe([(task.key, signal[task.key])])
        drawn.append(task.key)
        left_out.append(sampler.status()["deferred"]["env0"])
    passes = [set(drawn[:3]), set(drawn[3:6]), set(drawn[6:7]), set(drawn[7:8]), set(drawn[8:11]), set(drawn[11:12])]
    everything = {"0-0", "0-1", "0-2"}
    assert passes == [everything, everything, {"0-0"}, {"0-0"}, everything, {"0-0"}]
    assert left_out[6:9] == [2, 2, 0]


def test_an_unknown_group_defers_nothing_again():
    """A task that came back is left out of the passes after the one in which it was measured, not after any."""
    sampler = MixtureSampler(
        tasks([2]), 2, 7, MixtureConfig(curriculum=CurriculumConfig(defer_after=1, defer_passes=1))
    )
    sampler.next()
    sampler.observe([("0-0", [0.0, 0.0])])
    assert keys(sampler.next()).count("0-0") == 1  # the pass without it has one task, then all are back
    sampler.observe([("0-0", [])])
    assert keys(sampler.next()).count("0-0") == 1
    assert sampler.status()["deferred"] == {"env0": 0}


def test_one_group_with_signal_keeps_a_task():
    sampler = MixtureSampler(
        tasks([2]), 2, 7, MixtureConfig(curriculum=CurriculumConfig(defer_after=2, defer_passes=1))
    )
    for first in ([0.0, 0.0], [0.0, 1.0], [0.0, 0.0], [1.0, 0.0]) * 3:
        assert len(set(keys(sampler.next()))) == 2
        sampler.observe([("0-0", first), ("0-1", [0.0, 1.0])])


def test_when_all_tasks_are_deferred_all_are_played():
    sampler = MixtureSampler(tasks([4]), 4, 7, MixtureConfig(curriculum=CurriculumConfig(defer_after=1)))
    for _ in range(6):
        batch = keys(sampler.next())
        assert sorted(batch) == ["0-0", "0-1", "0-2", "0-3"]
        sampler.observe([(key, [0.0, 0.0]) for key in batch])


@pytest.mark.parametrize(
    ("sizes", "seed", "mixture", "words"),
    [
        ([5, 6], 7, MixtureConfig(weights="uniform"), "other training tasks"),
        ([5, 5], 8, MixtureConfig(weights="uniform"), "run.seed"),
        ([5, 5], 7, MixtureConfig(weights="temperature", temperature=2), r"weights=temperature.*saved with uniform"),
        ([5, 5], 7, MixtureConfig(weights="uniform", min_per_env=1), r"data\.mixture\.min_per_env=1.*saved with 0"),
        (
            [5, 5],
            7,
            MixtureConfig(weights="uniform", curriculum=ADAPTIVE),
            r"data\.mixture\.curriculum\.\w+=.*saved with",
        ),
    ],
)
def test_a_foreign_state_is_refused(sizes, seed, mixture, words):
    state = MixtureSampler(tasks([5, 5]), 4, 7, MixtureConfig(weights="uniform")).state_dict()
    with pytest.raises(UserError, match=words):
        MixtureSampler(tasks(sizes), 4, seed, mixture).load_state_dict(state)


def test_a_task_that_changed_its_environment_is_another_task():
    state = MixtureSampler(tasks([2, 2]), 4, 7, MixtureConfig(weights="uniform")).state_dict()
    moved = [Task("0-0", "p", "env1", "v"), *tasks([2, 2])[1:]]
    with pytest.raises(UserError, match="other training tasks"):
        MixtureSampler(moved, 4, 7, MixtureConfig(weights="uniform")).load_state_dict(state)


def test_the_state_of_whole_epochs_is_refused():
    state = PromptSampler(tasks([5, 5]), 4, 7).state_dict()
    with pytest.raises(UserError, match=r"data\.mixture\.weights=uniform.*saved with proportional"):
        MixtureSampler(tasks([5, 5]), 4, 7, MixtureConfig(weights="uniform")).load_state_dict(state)


@pytest.mark.parametrize(
    "mixture",
    [MixtureConfig(weights="uniform"), MixtureConfig(min_per_env=1), MixtureConfig(curriculum=ADAPTIVE)],
)
def test_whatever_is_asked_for_makes_a_mixture(mixture):
    assert isinstance(make_sampler(tasks([5, 5]), 4, 7, mixture), MixtureSampler)
    with pytest.raises(UserError, match="no task is left"):
        make_sampler([], 4, 7, mixture)

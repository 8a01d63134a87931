"""How many episodes may play: on simulated engines, and for any readings."""

from __future__ import annotations

from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulated_engines import STEP_TOKENS, Simulation

from megatron_fleet.rollout.concurrency import CUT, HARD, LARGEST_GROWTH, SOFT, START, Concurrency
from megatron_fleet.rollout.engine_statistics import EngineStatistics

FULL = {"steps": 10, "running": 400, "kv_usage": 9.7, "most_kv_usage": 1.0}


def reading(use: float, **counts) -> EngineStatistics:
    """Ten engine steps of 40 requests each."""
    return EngineStatistics(**{"steps": 10, "running": 400, "kv_usage": 10 * use, "most_kv_usage": use} | counts)


def grown(use: float, engines: int = 1, sequences: int = 1024, turnovers: int = 6) -> Concurrency:
    """Bounded so far by places: engines were at ``use`` whatever played."""
    concurrency = Concurrency(range(engines), sequences)
    for _ in range(turnovers):
        turnover(concurrency, reading(use), engines)
    return concurrency


def turnover(concurrency: Concurrency, counts: EngineStatistics, engines: int = 1) -> None:
    """Let as many episodes end as may play, and all places be taken."""
    allowed = concurrency.allowed
    for engine in range(engines):
        ended = allowed if engine == engines - 1 else 0
        concurrency.observe(engine, True, counts, playing=allowed, waiting=99, ended=ended)


@pytest.mark.parametrize("engines, mean, sigma", [(1, 2000, 0.7), (8, 2000, 0.5), (8, 2000, 1.0), (8, 10_000, 0.7)])
@pytest.mark.parametrize("seed", range(3))
def test_engines_become_nearly_full_and_stay_so_without_oscillation_or_many_preemptions(engines, mean, sigma, seed):
    played = Simulation(engines, kv=200_000, sequences=1024, mean=mean, sigma=sigma, seed=seed)
    life = mean // STEP_TOKENS
    played.play(8 * life)
    before = played.ended, sum(played.preemptions)
    played.play(12 * life)
    assert 0.5 < fmean(played.use[8 * life :]) < HARD
    # Few long episodes vary more.
    late = played.allowed[8 * life :]
    assert max(late) - min(late) < (0.6 if mean == 2000 else 1) * fmean(late)
    # Single episodes of a tenth of an engine's memory come by chance; without a bound each is preempted several times.
    assert sum(played.preemptions) - before[1] < (0.15 if sigma == 1 else 0.05) * (played.ended - before[0])


def test_the_first_turnovers_do_not_overshoot():
    played = Simulation(8, kv=200_000, sequences=1024, mean=2000)
    played.play(200)
    assert max(played.allowed[40:]) < 1.3 * played.allowed[-1] and sum(played.preemptions) < 0.02 * played.ended
    assert played.use[80] > 0.4


@pytest.mark.parametrize("episodes", [200, 600, 1500])
def test_steps_that_wait_for_their_last_episode_fill_engines_in_between(episodes):
    played = Simulation(4, kv=200_000, sequences=1024, mean=2000, step=episodes)
    played.play(4000)
    assert sum(played.preemptions) < 0.03 * played.ended
    half = len(played.use) // 2
    full = 4 * 200_000 * SOFT / (0.75 * 2000)
    assert max(played.use[half:]) > 0.6 or max(played.playing[half:]) == episodes < full
    assert min(played.allowed[half:]) > 0.6 * max(played.allowed[half:])


def test_long_contexts_that_hardly_fit_do_not_thrash():
    played = Simulation(2, kv=200_000, sequences=256, mean=40_000)
    played.play(16_000)
    assert max(played.allowed[8000:]) < 16
    assert sum(played.preemptions[8000:]) < 0.25 * played.ended


def test_a_number_that_the_engines_never_exceed_is_the_cap():
    played = Simulation(4, kv=10**7, sequences=100, mean=1000)
    played.play(400)
    assert (
        max(played.allowed) == played.allowed[-1] == 400 and max(map(len, (e.running for e in played.engines))) <= 100
    )


def test_half_of_the_engines_play_half_of_the_episodes_until_the_others_are_back():
    played = Simulation(4, kv=200_000, sequences=1024, mean=2000)
    played.play(600)
    before = played.allowed[-1]
    played.lose(0)
    played.lose(1)
    played.play(1)
    assert played.allowed[-1] == pytest.approx(before / 2, rel=0.02)
    played.play(300)
    assert 0.5 < fmean(played.use[-200:]) < HARD
    for engine in played.engines:
        engine.alive = True
    played.play(1)
    assert played.allowed[-1] > 1.6 * played.allowed[-2]
    played.play(300)
    assert 0.5 < fmean(played.use[-200:]) < HARD


def test_it_grows_once_in_a_turnover_by_half_of_the_room():
    concurrency = Concurrency(range(2), 1024)
    assert concurrency.allowed == 2 * START
    concurrency.observe(0, True, reading(0.5), playing=64, waiting=1, ended=63)
    concurrency.observe(1, True, reading(0.5), playing=64, waiting=1, ended=0)
    assert concurrency.allowed == 64
    concurrency.observe(0, True, reading(0.1), playing=64, waiting=1, ended=1)
    assert concurrency.allowed == 80  # by the turnover's largest use, 0.5 of 0.75
    assert grown(0.01, turnovers=1).allowed == START * (1 + LARGEST_GROWTH)
    assert grown(0.8).allowed == START


def test_it_does_not_grow_while_nobody_waits_for_a_place():
    concurrency = Concurrency(range(1), 1024)
    for _ in range(9):
        concurrency.observe(0, True, reading(0.1), playing=20, waiting=0, ended=20)
    assert concurrency.allowed == START


def test_it_shrinks_once_and_again_only_when_as_few_play_as_are_allowed():
    concurrency = grown(0.3)
    before = concurrency.allowed
    for _ in range(9):
        concurrency.observe(0, True, EngineStatistics(**FULL), playing=before, waiting=5, ended=0)
    assert concurrency.allowed == int(before * (1 - CUT))
    concurrency.observe(0, True, EngineStatistics(**FULL), playing=concurrency.allowed, waiting=5, ended=0)
    assert concurrency.allowed == int(before * (1 - CUT) ** 2)


def test_requests_without_memory_take_their_number_away_once():
    concurrency = grown(0.3, engines=4)
    before = concurrency.allowed
    crowded = reading(0.85, preemptions=3, most_kv_usage=1.0, waiting=40)
    concurrency.observe(2, True, crowded, playing=before, waiting=9, ended=0)
    assert concurrency.allowed == before - 3
    for _ in range(5):  # of them and one more, four requests wait on
        concurrency.observe(2, True, reading(0.85, waiting=40), playing=concurrency.allowed, waiting=9, ended=0)
    assert concurrency.allowed == before - 4


def test_preemptions_and_queues_while_there_is_memory_change_nothing():
    """A weight update preempts all requests, whose prompts are then computed again."""
    concurrency = grown(0.3)
    before = concurrency.allowed
    for _ in range(5):
        updated = reading(0.6, preemptions=40, waiting=200)
        concurrency.observe(0, True, updated, playing=before, waiting=9, ended=0)
    assert concurrency.allowed == before


def test_the_last_long_episodes_of_a_step_change_nothing():
    concurrency = grown(0.3)
    before = concurrency.allowed
    concurrency.observe(0, True, reading(0.7), playing=before, waiting=0, ended=0)
    for playing in range(before // 2, 0, -1):
        concurrency.observe(0, True, EngineStatistics(**FULL, preemptions=1), playing=playing, waiting=0, ended=1)
    assert concurrency.allowed == before


def test_a_step_with_fewer_episodes_than_allowed_can_still_be_too_large():
    concurrency = grown(0.3)
    assert concurrency.allowed > 100
    turnover(concurrency, reading(0.5))
    for _ in range(2):
        concurrency.observe(0, True, reading(0.1), playing=0, waiting=10, ended=concurrency.allowed)
    concurrency.observe(0, True, EngineStatistics(**FULL), playing=10, waiting=0, ended=0)
    assert concurrency.allowed == int(10 * (1 - CUT))


COUNTS = st.builds(
    EngineStatistics,
    steps=st.integers(1, 200),
    running=st.integers(0, 10_000),
    waiting=st.integers(0, 10_000),
    kv_usage=st.floats(0, 200),
    most_kv_usage=st.floats(0, 1),
    preemptions=st.integers(0, 500),
) | st.just(EngineStatistics())
OBSERVATION = st.tuples(
    st.integers(0, 3), st.booleans(), COUNTS, st.integers(0, 5000), st.integers(0, 100), st.integers(0, 5000)
)


@given(st.integers(1, 600), st.lists(OBSERVATION, max_size=60))
def test_whatever_engines_report_the_number_is_within_its_bounds_and_no_overload_raises_it(sequences, observations):
    concurrency, serving = Concurrency(range(4), sequences), [True] * 4
    for engine, serves, counts, playing, waiting, ended in observations:
        before, same = concurrency.allowed, serving[engine] == serves
        serving[engine] = serves
        concurrency.observe(engine, serves, counts, playing=playing, waiting=waiting, ended=ended)
        count = sum(serving) or 4
        assert 1 <= concurrency.allowed <= count * sequences
        if same:
            assert (1 - CUT) * before - 1 <= concurrency.allowed or playing < before or not waiting
            assert concurrency.allowed <= before * (1 + LARGEST_GROWTH) + 4
            overloaded = counts.preemptions and counts.most_kv_usage > HARD
            assert not (overloaded and playing <= before and waiting and concurrency.allowed > before)

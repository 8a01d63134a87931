"""The split: a fixed threshold of the key's hash, counts per environment, and sides that are kept."""

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_fleet.config.sections.data import DataConfig
from megatron_fleet.data.split import SplitManifest, key_hash, most_per_environment, split
from megatron_fleet.data.task import Task

quick = settings(deadline=None, max_examples=60)


def task(key, env="e"):
    return Task(key, "p", env, "v")


def rules(**keys):
    return DataConfig(tasks="t", **keys)


def keys(tasks):
    return {task.key for task in tasks}


def record(result, previous=None):
    sides = previous.sides() if previous else {}
    for side, tasks in (("train", result.train), ("eval", result.held_out), ("retired", result.retired)):
        sides |= dict.fromkeys(keys(tasks), side)
    lists = ([k for k, v in sides.items() if v == side] for side in ("eval", "train", "retired"))
    return SplitManifest("t", "", {}, *lists)


# Environments of 0 to 60 tasks: many where a limit of 1 to 12 binds, some where none does.
SIZES = st.dictionaries(st.sampled_from("abcdefgh"), st.integers(0, 60), min_size=1)
LIMITS = st.fixed_dictionaries(
    {
        "eval_fraction": st.sampled_from([0.02, 0.2, 0.5]),
        "min_eval_per_env": st.integers(0, 3),
        "max_eval_per_env": st.none() | st.integers(3, 12),
        "expected_eval_per_env": st.none() | st.integers(1, 12),
        "max_eval": st.none() | st.integers(1, 30),
        "held_out_environments": st.lists(st.sampled_from("abc"), max_size=2).map(tuple),
        "max_env_share": st.sampled_from([None, 0.2, 0.34, 0.5, 1.0]),
    }
)


def tasks_of(sizes, start=0):
    return [task(f"{env}_{i}", env) for env, size in sizes.items() for i in range(start, size)]


def grown(sizes, more):
    return tasks_of({env: sizes.get(env, 0) + more.get(env, 0) for env in {*sizes, *more}})


@quick
@given(SIZES, st.integers(1, 12))
def test_the_threshold_falls_with_the_size_of_an_environment(sizes, expected):
    result = split(tasks_of(sizes), rules(eval_fraction=0.3, expected_eval_per_env=expected))
    for env, size in sizes.items():
        below = {f"{env}_{i}" for i in range(size) if key_hash(f"{env}_{i}") < min(0.3, expected / size)}
        assert below == {t.key for t in result.held_out if t.env_key == env}
    whole = split(tasks_of(sizes), rules(expected_eval_per_env=expected, held_out_environments=tuple(sizes)))
    assert not whole.train and len(whole.held_out) == sum(sizes.values())


def test_hash_equals_fleets():
    assert key_hash("task_isk4pu4ojqyb_1768207401049_txq3w4lm8") == pytest.approx(0.2763937783169228, abs=1e-15)
    assert key_hash("github_task_0") == pytest.approx(0.25591879074970025, abs=1e-15)


@quick
@given(st.sets(st.text(), min_size=1), st.sets(st.text()), st.floats(0.01, 0.5), st.floats(0, 0.49))
def test_without_limits_tasks_never_move(some, others, fraction, more):
    result = split([task(key) for key in some], rules(eval_fraction=fraction))
    assert keys(result.train) | keys(result.held_out) == some
    wide = split([task(key) for key in some | others], rules(eval_fraction=fraction))
    assert keys(result.train) <= keys(wide.train)
    assert keys(result.held_out) <= keys(wide.held_out)
    larger = split([task(key) for key in some], rules(eval_fraction=fraction + more))
    assert keys(result.held_out) <= keys(larger.held_out)


@quick
@given(SIZES, SIZES, LIMITS)
def test_with_a_manifest_nothing_goes_from_one_side_to_the_other(sizes, more, limits):
    before = split(tasks_of(sizes), rules(**limits))
    manifest = record(before)
    after = split(grown(sizes, more), rules(**limits), manifest)
    assert not keys(before.held_out) & keys(after.train)
    assert not keys(before.train) & keys(after.held_out)
    # With the same limits there is room for all that was there.
    assert keys(before.held_out) == keys(after.held_out) & keys(tasks_of(sizes))
    again = split(tasks_of(sizes), rules(**limits), manifest)
    assert (again.train, again.held_out, again.unused) == (before.train, before.held_out, before.unused)


@quick
@given(SIZES, SIZES, LIMITS, LIMITS, LIMITS)
def test_a_manifest_holds_when_the_rules_change_and_tasks_come_and_go(sizes, more, first, second, third):
    one = split(tasks_of(sizes), rules(**first))
    manifest = record(one)
    two = split(tasks_of(more), rules(**second), manifest)
    manifest = record(two, manifest)
    three = split(grown(sizes, more), rules(**third), manifest)
    trained = keys(one.train) | keys(two.train) | keys(three.train)
    assert not trained & (keys(one.held_out) | keys(two.held_out) | keys(three.held_out))
    assert not keys(two.retired) & (keys(three.train) | keys(three.held_out))


@quick
@given(SIZES, LIMITS, st.randoms())
def test_every_task_has_one_fate_whatever_the_order(sizes, limits, order):
    tasks = tasks_of(sizes)
    result = split(tasks, rules(**limits))
    fates = [result.train, result.held_out, result.retired, result.unused]
    assert sorted(t.key for fate in fates for t in fate) == sorted(t.key for t in tasks)
    assert not result.retired
    place = {t.key: i for i, t in enumerate(tasks)}
    assert all(fate == sorted(fate, key=lambda t: place[t.key]) for fate in fates)
    shuffled = list(tasks)
    order.shuffle(shuffled)
    other = split(shuffled, rules(**limits))
    assert [keys(f) for f in fates] == [keys(f) for f in (other.train, other.held_out, other.retired, other.unused)]


@quick
@given(SIZES, LIMITS)
def test_limits_hold(sizes, limits):
    tasks = tasks_of(sizes)
    result = split(tasks, rules(**limits))
    held_out_environments = set(limits["held_out_environments"])
    assert not held_out_environments & {t.env_key for t in result.train}
    counts = Counter(t.env_key for t in result.held_out)
    ordinary = {env: n for env, n in counts.items() if env not in held_out_environments}
    assert len(result.held_out) <= (limits["max_eval"] or len(tasks))
    assert all(n <= (limits["max_eval_per_env"] or len(tasks)) for n in ordinary.values())
    without_total = split(tasks, rules(**{**limits, "max_eval": None}))
    for env in {t.env_key for t in without_total.held_out}:
        expected = sizes[env] * limits["eval_fraction"]
        assert expected >= limits["min_eval_per_env"] or env in held_out_environments
    assert len(result.notes) == len(held_out_environments - {env for env, size in sizes.items() if size}) + (
        "data.max_env_share" in "".join(result.notes)
    )
    # In turn: none has two more than one that still had tasks to give.
    given_by = Counter(t.env_key for t in without_total.held_out)
    assert all(counts[a] - 1 <= counts[b] for a in counts for b in given_by if counts[b] < given_by[b])
    # The smallest hashes of each environment.
    for env, n in ordinary.items():
        of_env = sorted(key_hash(t.key) for t in tasks if t.env_key == env)
        assert sorted(key_hash(t.key) for t in result.held_out if t.env_key == env) == of_env[:n]


@quick
@given(SIZES, LIMITS)
def test_what_is_not_evaluated_is_trained_but_for_the_share_and_held_out_environments(sizes, limits):
    result = split(tasks_of(sizes), rules(**{**limits, "max_env_share": None}))
    assert {t.env_key for t in result.unused} <= set(limits["held_out_environments"])


@quick
@given(st.lists(st.integers(1, 3000), min_size=1, max_size=30), st.sampled_from([0.05, 0.2, 0.29, 0.34, 0.5, 1.0]))
def test_the_largest_share_is_of_the_final_mix(sizes, share):
    """Against trying every limit."""

    def fits(most):
        final = [min(size, most) for size in sizes]
        return max(final) <= share * sum(final) * (1 + 1e-12)

    best = max((most for most in range(1, max(sizes) + 1) if fits(most)), default=0)
    found = most_per_environment(sizes, share)
    if best < max(sizes) and best < sum(sizes) / len(sizes):
        assert found is None
    else:
        assert found == best
        assert fits(found)
    if len(sizes) < 1 / share - 1e-9:
        assert found is None


def test_a_share_cuts_large_environments_and_no_run_on_few():
    sizes = {"a": 3000, "b": 1000, "c": 500, "d": 500, "e": 500, "f": 500}
    result = split(tasks_of(sizes), rules(max_env_share=0.3))
    counts = Counter(t.env_key for t in result.train)
    assert counts["a"] / len(result.train) == pytest.approx(0.3, abs=1e-3)
    assert all(counts[env] == sum(key_hash(f"{env}_{i}") >= 0.2 for i in range(sizes[env])) for env in "bcdef")
    assert {t.env_key for t in result.unused} == {"a"} and not result.notes
    kept = [key_hash(t.key) for t in result.train if t.env_key == "a"]
    assert max(kept) < min(key_hash(t.key) for t in result.unused)
    for few in ({"a": 2081}, {"a": 3000, "b": 10}, {"a": 900, "b": 900, "c": 1, "d": 1}):
        result = split(tasks_of(few), rules(max_env_share=0.2))
        assert not result.unused
        assert "data.max_env_share=0.2 is not applied" in result.notes[0]


def test_a_limit_that_is_just_met():
    assert most_per_environment([29, *[1] * 71], 0.29) == 29  # 0.29 · 100 is 28.999… in binary
    everything = split(tasks_of({"a": 50}), rules()).held_out
    assert everything == split(tasks_of({"a": 50}), rules(min_eval_per_env=10)).held_out
    assert not split(tasks_of({"a": 49}), rules(min_eval_per_env=10)).held_out


def test_tasks_that_may_not_be_evaluated_any_more_are_retired_for_ever():
    tasks = tasks_of({"a": 100, "b": 100})
    first = split(tasks, rules(eval_fraction=0.3))
    manifest = record(first)
    fewer = split(tasks, rules(eval_fraction=0.3, max_eval_per_env=5), manifest)
    assert Counter(t.env_key for t in fewer.held_out) == {"a": 5, "b": 5}
    assert keys(fewer.retired) == keys(first.held_out) - keys(fewer.held_out)
    assert fewer.train == first.train
    back = split(tasks, rules(eval_fraction=0.3), record(fewer, manifest))
    assert back.held_out == fewer.held_out and back.retired == fewer.retired


def test_a_trained_environment_that_is_now_held_out_is_not_evaluated_on_what_was_trained():
    first = split(tasks_of({"a": 50, "b": 50}), rules())
    result = split(tasks_of({"a": 50, "b": 60}), rules(held_out_environments=("b",), max_eval_per_env=1), record(first))
    old = {t.key for t in first.train if t.env_key == "b"}
    assert keys(result.retired) == old | {
        t.key for t in sorted((t for t in first.held_out if t.env_key == "a"), key=lambda t: key_hash(t.key))[1:]
    }
    assert {t.key for t in result.held_out if t.env_key == "b"} == {f"b_{i}" for i in range(60)} - old


def test_an_earlier_evaluation_task_keeps_its_place_against_smaller_hashes():
    tasks = sorted((task(f"t{i}") for i in range(200)), key=lambda t: key_hash(t.key))
    newer, older = tasks[:10], tasks[10:]
    limits = rules(max_eval_per_env=5)
    first = split(older, limits)
    assert first.held_out == older[:5]
    assert split(tasks, limits).held_out == newer[:5]
    kept = split(tasks, limits, record(first))
    assert kept.held_out == older[:5] and keys(newer) <= keys(kept.train)


def test_share_is_near_the_fraction():
    for env in "ab":
        result = split(tasks_of({env: 2000}), rules())
        assert 0.17 < len(result.held_out) / 2000 < 0.23


def fleets_split(tasks, max_env_ratio=0.2):
    """Fleet's own preparation: 20 %, at least 5 and at most 20 of an environment, 60 in all, 20 % of the total."""
    by_env = {}
    for t in sorted(tasks, key=lambda t: key_hash(t.key)):
        by_env.setdefault(t.env_key, []).append(t)
    train, held_out = {}, {}
    for env, of_env in by_env.items():
        target = min(int(len(of_env) * 0.2), 20)
        effective = target / len(of_env) if target >= 5 else 0.0
        held_out[env] = [t for t in of_env if key_hash(t.key) < effective]
        train[env] = [t for t in of_env if key_hash(t.key) >= effective]
    if sum(map(len, held_out.values())) > 60:
        queues = {env: list(of_env) for env, of_env in sorted(held_out.items())}
        chosen = []
        while len(chosen) < 60:
            for queue in queues.values():
                if queue and len(chosen) < 60:
                    chosen.append(queue.pop(0))
        held_out = {"all": chosen}
    most = int(sum(map(len, train.values())) * max_env_ratio)
    return [t for of_env in train.values() for t in of_env[:most]], [t for ts in held_out.values() for t in ts]


V03 = {
    "amazon": 18, "booking": 1336, "carlisle": 38, "dropbox": 3, "fira": 66, "fostgres": 949, "github": 2081,
    "google-maps": 4727, "hubspot": 19, "outlook": 39, "reddit": 455, "ticketmaster": 257, "wallst": 69,
    "zillow": 118,
}  # fmt: skip
"""Tasks of each environment in v0.3, as published."""
BALANCED = {
    "eval_fraction": 0.2,
    "min_eval_per_env": 5,
    "max_eval_per_env": 20,
    "max_eval": 60,
    "max_env_share": 0.2,
}


def test_on_the_published_counts_the_evaluation_tasks_are_fleets():
    assert sum(V03.values()) == 10175
    tasks = tasks_of(V03)
    result = split(tasks, rules(**BALANCED))
    train, held_out = fleets_split(tasks)
    assert len(held_out) == 60 and keys(result.held_out) == keys(held_out)
    # Fleet's cut is of the total before it, so two environments still have more than 20 %; here none has.
    assert max(Counter(t.env_key for t in train).values()) > 0.27 * len(train)
    counts = Counter(t.env_key for t in result.train)
    assert max(counts.values()) <= 0.2 * len(result.train)
    assert set(counts) == set(V03)
    # Nothing is lost but what the share cuts.
    assert {t.env_key for t in result.unused} == {"google-maps", "github", "booking"}
    assert len(result.train) + len(result.unused) + 60 == 10175


def test_a_run_on_github_alone_keeps_its_tasks():
    tasks = tasks_of({"github": 2081})
    result = split(tasks, rules(**BALANCED))
    assert len(result.train) >= 0.95 * 2081 and len(result.held_out) == 20
    assert len(fleets_split(tasks)[0]) == pytest.approx(414, abs=3)


def test_growing_environments_move_tasks_in_fleets_split_and_not_here():
    few, many = tasks_of({"github": 100}), tasks_of({"github": 2081})
    assert keys(fleets_split(few)[1]) & keys(fleets_split(many)[0])
    limits = rules(**BALANCED)
    manifest = record(split(few, limits))
    assert not keys(split(few, limits).held_out) & keys(split(many, limits, manifest).train)


def test_the_rules_do_not_depend_on_the_machines_randomness():
    tasks = tasks_of(V03)
    random.Random(1).shuffle(tasks)
    assert keys(split(tasks, rules(**BALANCED)).train) == keys(split(tasks_of(V03), rules(**BALANCED)).train)

"""The split depends on the key alone."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_fleet.data.split import key_hash, split
from megatron_fleet.data.task import Task


def task(key):
    return Task(key, "p", "e", "v")


def test_hash_equals_fleets():
    assert key_hash("task_isk4pu4ojqyb_1768207401049_txq3w4lm8") == pytest.approx(0.2763937783169228, abs=1e-15)
    assert key_hash("github_task_0") == pytest.approx(0.25591879074970025, abs=1e-15)


@given(st.sets(st.text(), min_size=1), st.sets(st.text()), st.floats(0.01, 0.5), st.floats(0, 0.49))
def test_tasks_never_move(keys, others, fraction, more):
    train, held_out = split(map(task, sorted(keys)), fraction)
    assert sorted(t.key for t in train + held_out) == sorted(keys)
    wide_train, wide_held_out = split(map(task, sorted(keys | others)), fraction)
    assert {t.key for t in train} <= {t.key for t in wide_train}
    assert {t.key for t in held_out} <= {t.key for t in wide_held_out}
    _, larger = split(map(task, sorted(keys)), fraction + more)
    assert {t.key for t in held_out} <= {t.key for t in larger}


def test_share_is_near_the_fraction_and_order_is_kept():
    tasks = [task(f"t{i}") for i in range(2000)]
    train, held_out = split(tasks, 0.2)
    assert 0.17 < len(held_out) / 2000 < 0.23
    order = [t.key for t in tasks]
    assert [t.key for t in train] == sorted((t.key for t in train), key=order.index)

"""Filters keep what they should, tell why the rest goes, and take a number of tasks in proportion."""

import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_fleet.config.errors import UserError
from megatron_fleet.config.sections.data import DataConfig
from megatron_fleet.data.selection import choose, read_exclusion, select
from megatron_fleet.data.split import split
from megatron_fleet.data.task import Task

TASKS = [
    Task("a1", "p", "a", "v", difficulty=1),
    Task("a2", "p", "a", "v", difficulty=3, modality="computer_use"),
    Task("b1", "p", "b", "v", difficulty=2),
    Task("b2", "p", "b", "v"),
    Task("d1", "p", "dropbox", "v"),
]


def chosen(**keys):
    result = select(TASKS, DataConfig(tasks="t", **keys))
    assert sorted([*result.kept, *(task for task, _ in result.removed)], key=TASKS.index) == TASKS
    return [task.key for task in result.kept], {task.key: reason for task, reason in result.removed}


@pytest.mark.parametrize(
    ("keys", "kept"),
    [
        ({}, "a1 a2 b1 b2 d1"),
        ({"modality": "computer_use"}, "a2"),
        ({"modality": "tool_use"}, "a1 b1 b2 d1"),
        ({"environments": ("b", "dropbox")}, "b1 b2 d1"),
        ({"difficulties": (1, 3)}, "a1 a2"),
        ({"exclusions": ("dropbox",)}, "a1 a2 b1 b2"),
        ({"environments": ("a",), "difficulties": (3,)}, "a2"),
    ],
)
def test_filters(keys, kept):
    assert chosen(**keys)[0] == kept.split()


def test_the_first_filter_that_removes_a_task_is_its_reason():
    _, removed = chosen(modality="tool_use", environments=("a", "b"), difficulties=(2,), exclusions=("dropbox",))
    assert removed == {"a1": "difficulty", "a2": "modality", "b2": "difficulty", "d1": "environment"}


@pytest.mark.parametrize(
    ("key", "names"), [("environments", ("a", "githb")), ("held_out_environments", ("githb", "instacart"))]
)
def test_environments_that_no_task_has_are_refused(key, names):
    with pytest.raises(UserError, match=rf"data\.{key} names githb, .*a, b, dropbox"):
        chosen(**{key: names})


def test_held_out_environments_need_not_all_be_there():
    assert chosen(held_out_environments=("a", "instacart")) == chosen()


def test_shipped_lists():
    zillow, dropbox = read_exclusion("zillow_partial_dates"), read_exclusion("dropbox")
    assert len(zillow.tasks) == 21 and not zillow.environments
    assert "task_g3wpj1mcl0lf_1768546181946_59vtqn9fw" in zillow.tasks
    assert dropbox.environments == {"dropbox"} and zillow.reason and dropbox.reason


@pytest.mark.parametrize("suffix", ["json", "yaml"])
def test_own_lists(tmp_path, suffix):
    file = tmp_path / f"mine.{suffix}"
    file.write_text(json.dumps({"reason": "broken", "tasks": ["b1"], "environments": ["a"]}))
    kept, removed = chosen(exclusions=(str(file),))
    assert kept == ["b2", "d1"] and set(removed.values()) == {"mine"}


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("[a]", "reason"),
        ("tasks: [a]", "reason"),
        ("reason: r", "excludes nothing"),
        ("reason: r\ntasks: a", "tasks must be a list"),
        ("reason: r\ntasks: [1]", "tasks must be a list"),
        ("reason: r\nkeys: [a]", "keys is not a key"),
        ("reason: [", "not usable YAML"),
    ],
)
def test_malformed_lists_are_refused(tmp_path, text, word):
    (tmp_path / "l.yaml").write_text(text)
    with pytest.raises(UserError, match=word):
        read_exclusion(str(tmp_path / "l.yaml"))


@pytest.mark.parametrize("name", ["dropbx", "nowhere.yaml", "../exclusions"])
def test_unknown_lists_are_refused(name):
    with pytest.raises(UserError, match="dropbox, zillow_partial_dates"):
        read_exclusion(name)


@settings(deadline=None, max_examples=60)
@given(st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 80), min_size=1), st.integers(1, 200), st.randoms())
def test_a_number_of_tasks_is_in_proportion_and_not_the_head_of_the_file(sizes, most, order):
    tasks = [Task(f"{env}{i}", "p", env, "v") for env, size in sizes.items() for i in range(size)]
    keys = choose(tasks, most)
    assert len(keys) == min(most, len(tasks))
    counts = Counter(key[0] for key in keys)
    for env, size in sizes.items():
        # The quota rule that Sainte-Laguë's method keeps but for rare cases by more than one.
        assert abs(counts[env] - len(keys) * size / len(tasks)) < 2
    # His property: no seat would serve another better.
    for one in sizes:
        for other in sizes:
            if counts[one]:
                assert sizes[one] / (2 * counts[one] - 1) >= sizes[other] / (2 * counts[other] + 1) - 1e-9
    order.shuffle(tasks)
    assert choose(tasks, most) == keys
    assert keys <= choose(tasks, most + 1)


def test_the_chosen_tasks_are_not_all_for_evaluation():
    tasks = [Task(f"t{i}", "p", "e", "v") for i in range(2000)]
    kept = select(tasks, DataConfig(tasks="t", max_tasks=400))
    assert {reason for _, reason in kept.removed} == {"max_tasks"} and len(kept.kept) == 400
    assert 50 < len(split(kept.kept, DataConfig(tasks="t")).held_out) < 110

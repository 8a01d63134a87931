"""The embedded fleet's tasks: all solvable, none solved by accident, and learnable from imperfect demonstrations."""

import random
import sqlite3
from collections import Counter

import pytest

from megatron_fleet.data.dataset import load_tasks
from megatron_fleet.embedded_fleet.solver import demonstrate, recognise
from megatron_fleet.embedded_fleet.tasks import (
    SHIPPED_TASKS,
    TYPES,
    WORLDS,
    EmbeddedSession,
    generate,
    generate_rows,
    write_tasks,
)
from megatron_fleet.embedded_fleet.tasktype import FinalAnswer
from megatron_fleet.envs.base import ToolCall

TASKS = generate()
SAMPLE = generate(seed=7, per_env=21)
CALM = pytest.mark.parametrize("task", SAMPLE[::3], ids=lambda t: t.key)


def test_the_shipped_file_is_what_the_generator_makes(tmp_path):
    write_tasks(tmp_path / "tasks.json", generate_rows())
    assert (tmp_path / "tasks.json").read_bytes() == SHIPPED_TASKS.read_bytes()
    assert load_tasks(SHIPPED_TASKS) == TASKS
    assert SHIPPED_TASKS.stat().st_size < 1_000_000


def test_tasks_are_many_and_distinct():
    assert len({t.key for t in TASKS}) == len({(t.prompt, t.data_key) for t in TASKS}) == len(TASKS) >= 600
    assert min(Counter(t.env_key for t in TASKS).values()) >= 200
    kinds = Counter((t.env_key, recognise(t)[0].name) for t in TASKS)
    assert len(kinds) == sum(map(len, TYPES.values())) == 20
    assert min(kinds.values()) >= 20
    assert not {t.data_key for t in TASKS} & {t.data_key for t in SAMPLE}


def test_a_prompt_reads_as_one_type_only():
    for task in TASKS:
        assert sum(kind.read(task.prompt) is not None for kind in TYPES[task.env_key]) == 1


@CALM
def test_solved_by_the_solver_and_by_nothing_less(task):
    demo = demonstrate(task)
    assert demo.reward == 1
    calls = [turn for turn, _ in demo.turns if isinstance(turn, ToolCall)]
    assert 1 <= len(calls) <= 5
    assert all(o.error is None and len(o.content.split()) < 60 for _, o in demo.turns if o is not None)
    for answer in (None, "", "done"):
        assert EmbeddedSession(task).verify(answer) == 0


@CALM
def test_any_other_change_spoils_the_task(task):
    """After a perfect episode, one more change anywhere in the database is noticed."""
    demo = demonstrate(task)
    session = EmbeddedSession(task)
    for turn, _ in demo.turns[:-1]:
        session.call(turn)
    assert session.verify(demo.answer) == 1
    for table, columns in session.world.columns.items():
        column = columns.split(", ")[-1]
        session.world.db.execute("SAVEPOINT s; ")
        session.world.db.execute(
            f"UPDATE {table} SET {column} = 'other' WHERE rowid = (SELECT max(rowid) FROM {table})"
        )
        assert session.verify(demo.answer) == 0
        session.world.db.execute("ROLLBACK TO s")
        session.world.db.execute("RELEASE s")


def test_wrong_answers_fail():
    answered = 0
    for task in SAMPLE:
        demo = demonstrate(task)
        if demo.answer == "done":
            continue
        answered += 1
        session = EmbeddedSession(task)
        for turn, _ in demo.turns[:-1]:
            session.call(turn)
        assert session.verify(f" {demo.answer.upper()}.") == 1
        assert session.verify(f"{demo.answer} or another") == 0
        assert session.verify("none") == 0
    assert answered >= 20


def test_worlds_depend_on_the_data_key_alone():
    for env_key, world in WORLDS.items():
        assert world("a", {"LOGGED_IN_USER": "Ana"}).seed == world("a", {}).seed
        assert world("a", {}).seed != world("b", {}).seed, env_key


def test_demonstrations_are_deterministic_and_mistakes_are_choices():
    for task in SAMPLE:
        right = demonstrate(task)
        again = demonstrate(task, mistakes=0.3, rng=random.Random(5))
        assert [t for t, _ in again.turns] == [t for t, _ in demonstrate(task, 0.3, random.Random(5)).turns]
        words = _words(task.prompt) | set(task.env_variables.values())
        for turn, shown in again.turns:
            text = turn.text if isinstance(turn, FinalAnswer) else " ".join(map(str, turn.arguments.values()))
            assert _words(text) <= words | {"done", "status", "agent", "closed", "pending"}
            words |= _words(shown.content) if shown else set()
        assert right.reward == 1


def _words(text):
    return set(text.replace("'s", "").replace(",", " ").replace(".", " ").replace("?", " ").split())


@pytest.mark.slow
def test_the_mistake_rate_tunes_the_success_rate():
    rng = random.Random(0)
    rates = [sum(demonstrate(t, m, rng).reward for t in TASKS) / len(TASKS) for m in (0.1, 0.31, 0.6)]
    assert rates[0] > 0.7
    assert 0.3 < rates[1] < 0.5
    assert rates[2] < 0.2


@pytest.mark.slow
def test_every_shipped_task_is_solvable_and_not_solved_by_doing_nothing():
    for task in TASKS:
        assert demonstrate(task).reward == 1, task.key
        assert EmbeddedSession(task).verify(None) == 0, task.key
        assert EmbeddedSession(task).verify("done") == 0, task.key


def test_verifiers_cannot_change_what_they_judge():
    session = EmbeddedSession(SAMPLE[0])
    code = (
        "def validate_task(env, final_answer=None):\n    env.db('current').query('DELETE FROM tickets')\n    return 1"
    )
    bad = EmbeddedSession(type(SAMPLE[0])(**{**_fields(SAMPLE[0]), "verifier_code": code}))
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        bad.verify(None)
    assert session.world.query("SELECT count(*) FROM tickets") == [(12,)]


def _fields(task):
    return {name: getattr(task, name) for name in type(task).__slots__}

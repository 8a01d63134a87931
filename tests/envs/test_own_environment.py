"""The example of an environment of one's own, opened and played as a worker does it."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_fleet.config.errors import UserError
from megatron_fleet.config.schema import EnvConfig
from megatron_fleet.data.source import read_source
from megatron_fleet.data.task import Task
from megatron_fleet.envs.base import ToolCall
from megatron_fleet.envs.registry import ServerStart, make_environment, serve

EXAMPLES = Path(__file__).parents[2] / "examples"
OWN = EnvConfig(kind="my_environment:HigherLower")


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)


async def play(first: int, last: int) -> tuple[float | None, int]:
    """The reward of a binary search, and its guesses."""
    environment = make_environment(OWN, "", "1/0/0/0/number-3")
    shown = await environment.reset(Task("number-3", "Find it.", "higher_lower"))
    assert (shown.content, [tool["function"]["name"] for tool in shown.tools]) == ("Find it.", ["guess"])
    guesses, done = 0, False
    while not done:
        middle = (first + last) // 2
        observed = await environment.step(ToolCall("guess", {"number": middle}))
        first, last = (middle + 1, last) if observed.content == "higher" else (first, middle - 1)
        guesses, done = guesses + 1, observed.done
    reward = await environment.verify(None, [])
    await environment.close()
    return reward.value, guesses


async def test_it_is_played_as_any_other(tmp_path):
    assert serve(ServerStart(OWN, tmp_path / "log", "python", 0)).url == ""
    value, guesses = await play(1, 100)
    assert value == 1.0 and 1 <= guesses <= 7
    value, guesses = await play(101, 200)
    assert value == 0.0 and guesses == 7
    environment = make_environment(OWN, "")
    await environment.reset(Task("number-3", "Find it.", "higher_lower"))
    for call in (ToolCall("guess", {"number": "7"}), ToolCall("look", {})):
        assert (await environment.step(call)).error is not None


def test_its_tasks_are_a_task_file():
    rows = read_source(EXAMPLES / "numbers.json").rows
    assert len(rows) == 40


def test_one_that_is_not_there_is_refused():
    with pytest.raises(UserError, match=r"^env.kind=my_environment:Other: my_environment has no Other"):
        make_environment(EnvConfig(kind="my_environment:Other"), "")

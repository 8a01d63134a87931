"""Scripted solver: proves that every task is solvable, and gives demonstrations with a chosen rate of mistakes."""

from __future__ import annotations

import random
from dataclasses import dataclass

from megatron_fleet.data.task import Task
from megatron_fleet.embedded_fleet.tasks import TYPES, EmbeddedSession
from megatron_fleet.embedded_fleet.tasktype import DONE, Choices, FinalAnswer, GaveUp, TaskType, Turn, Turns
from megatron_fleet.envs.base import Observation


@dataclass(slots=True)
class Demonstration:
    """One scripted episode: each tool call with its observation, the final answer, and the verifier's verdict."""

    task: Task
    turns: list[tuple[Turn, Observation | None]]
    answer: str
    reward: float


def recognise(task: Task) -> tuple[TaskType, dict[str, str]]:
    """Parse the task's type and fields from its prompt alone.

    Raises:
        ValueError: the prompt matches no embedded task type.
    """
    for kind in TYPES.get(task.env_key, ()):
        fields = kind.read(task.prompt)
        if fields is not None:
            return kind, fields
    raise ValueError(f"task {task.key}: no embedded task type reads like its prompt")


def solve(task: Task, mistakes: float = 0.0, rng: random.Random | None = None, notes: list[str] | None = None) -> Turns:
    """Run a scripted agent for this task: send it each Observation, it yields tool calls and finally a FinalAnswer.

    It knows only the prompt, the logged-in user and the tools' results. Each of its choices is wrong with probability
    ``mistakes``. ``notes``, if given, receives its decisions (rows and conditions, see ``Choices``) before the turn
    that acts on them.
    """
    kind, fields = recognise(task)
    user = str(task.env_variables["LOGGED_IN_USER"])
    choices = Choices(user, mistakes, rng or random.Random(0), notes if notes is not None else [])
    try:
        answer = yield from kind.solve(choices, **fields)
    except GaveUp:
        answer = DONE
    yield FinalAnswer(answer)


def demonstrate(task: Task, mistakes: float = 0.0, rng: random.Random | None = None) -> Demonstration:
    """Play the scripted agent against the task's environment in this process."""
    session = EmbeddedSession(task)
    try:
        agent = solve(task, mistakes, rng)
        turns: list[tuple[Turn, Observation | None]] = []
        turn = next(agent)
        while not isinstance(turn, FinalAnswer):
            observation = session.call(turn)
            turns.append((turn, observation))
            turn = agent.send(observation)
        turns.append((turn, None))
        return Demonstration(task, turns, turn.text, session.verify(turn.text))
    finally:
        session.close()

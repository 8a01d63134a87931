"""Task types of ``tickets``."""

from __future__ import annotations

import random
from typing import Any

from megatron_fleet.embedded_fleet.tasktype import DONE, Choices, Goal, Row, Steps, TaskType
from megatron_fleet.embedded_fleet.world import World
from megatron_fleet.envs.base import ToolCall

Fields = dict[str, Any] | None


def _open_ticket(world: World, rng: random.Random, where: str = "agent != 'none'") -> dict[str, Any] | None:
    """Pick a random open ticket; its customer, subject and status identify it."""
    rows = world.query(f"SELECT id, customer, subject, agent FROM tickets WHERE status = 'open' AND {where}")
    if not rows:
        return None
    return dict(zip(("id", "customer", "subject", "agent"), rng.choice(rows), strict=True))


def _free_agent(world: World, rng: random.Random) -> tuple[str, str]:
    """Return name and team of a random free agent."""
    return rng.choice(world.query("SELECT id, team FROM agents WHERE state = 'free'"))


def _told(ticket: dict[str, Any], **more: str) -> dict[str, Any]:
    return {"customer": ticket["customer"], "subject": ticket["subject"], **more}


def _find(c: Choices, customer: str, subject: str) -> Steps[Row]:
    rows = yield from c.look("search_tickets", customer=customer)
    return c.row(rows, subject=subject, status="open")


def make_close(world: World, rng: random.Random, goal: Goal) -> Fields:
    if (ticket := _open_ticket(world, rng)) is None:
        return None
    goal.update("tickets", ticket["id"], status="closed")
    return _told(ticket)


def solve_close(c: Choices, customer: str, subject: str) -> Steps[str]:
    rows = yield from c.look("search_tickets", customer=customer)
    match = {"subject": subject, "status": "open"}
    if not c.forgets():
        yield from c.act_on(
            rows, match, lambda r: ToolCall("update_ticket", {"id": r["id"], "field": "status", "value": "closed"})
        )
    return DONE


def make_who(world: World, rng: random.Random, goal: Goal) -> Fields:
    if (ticket := _open_ticket(world, rng)) is None:
        return None
    goal.answer = ticket["agent"]
    return _told(ticket)


def solve_who(c: Choices, customer: str, subject: str) -> Steps[str]:
    ticket = yield from _find(c, customer, subject)
    shown = c.row((yield from c.look("get_ticket", id=ticket["id"])))
    return c.value(shown["agent"], [customer])


def make_free_agent(world: World, rng: random.Random, goal: Goal) -> Fields:
    agent, team = _free_agent(world, rng)
    if (ticket := _open_ticket(world, rng, f"agent != '{agent}'")) is None:
        return None
    goal.update("tickets", ticket["id"], agent=agent)
    return _told(ticket, team=team)


def solve_free_agent(c: Choices, customer: str, subject: str, team: str) -> Steps[str]:
    ticket = yield from _find(c, customer, subject)
    agents = yield from c.look("list_agents", team=team)
    if not c.forgets():
        yield from c.act_on(
            agents,
            {"state": "free"},
            lambda r: ToolCall("update_ticket", {"id": ticket["id"], "field": "agent", "value": r["name"]}),
        )
    return DONE


def make_if_high(world: World, rng: random.Random, goal: Goal) -> Fields:
    high = rng.random() < 0.5
    if (ticket := _open_ticket(world, rng, f"agent != 'none' AND priority = '{'high' if high else 'low'}'")) is None:
        return None
    goal.update("tickets", ticket["id"], status="pending" if high else "closed")
    return _told(ticket)


def solve_if_high(c: Choices, customer: str, subject: str) -> Steps[str]:
    ticket = yield from _find(c, customer, subject)
    value = "pending" if c.holds(ticket["priority"] == "high") else "closed"
    yield from c.act("update_ticket", id=ticket["id"], field="status", value=value)
    return DONE


def make_hand_over(world: World, rng: random.Random, goal: Goal) -> Fields:
    agent, _ = _free_agent(world, rng)
    if (ticket := _open_ticket(world, rng, f"agent NOT IN ('none', '{agent}')")) is None:
        return None
    goal.update("tickets", ticket["id"], agent=agent)
    goal.answer = ticket["agent"]
    return _told(ticket, agent=agent)


def solve_hand_over(c: Choices, customer: str, subject: str, agent: str) -> Steps[str]:
    ticket = yield from _find(c, customer, subject)
    shown = c.row((yield from c.look("get_ticket", id=ticket["id"])))
    yield from c.act("update_ticket", id=ticket["id"], field="agent", value=agent)
    return c.value(shown["agent"], [agent, customer])


def make_close_staffed(world: World, rng: random.Random, goal: Goal) -> Fields:
    agent, _ = _free_agent(world, rng)
    lonely = rng.random() < 0.5
    where = "agent = 'none'" if lonely else f"agent NOT IN ('none', '{agent}')"
    if (ticket := _open_ticket(world, rng, where)) is None:
        return None
    changes = {"agent": agent} if lonely else {}
    goal.update("tickets", ticket["id"], status="closed", **changes)
    return _told(ticket, agent=agent)


def solve_close_staffed(c: Choices, customer: str, subject: str, agent: str) -> Steps[str]:
    ticket = yield from _find(c, customer, subject)
    shown = c.row((yield from c.look("get_ticket", id=ticket["id"])))
    if c.holds(shown["agent"] == "none"):
        yield from c.do("update_ticket", id=ticket["id"], field="agent", value=agent)
    yield from c.act("update_ticket", id=ticket["id"], field="status", value="closed")
    return DONE


TYPES = (
    TaskType(
        "close",
        1,
        ("Close the open {subject} ticket of {customer}.", "{customer}'s open {subject} ticket is solved, close it."),
        make_close,
        solve_close,
    ),
    TaskType(
        "who",
        1,
        (
            "Who handles the open {subject} ticket of {customer}? Answer with the name.",
            "Which agent has {customer}'s open {subject} ticket? Answer with the name.",
        ),
        make_who,
        solve_who,
    ),
    TaskType(
        "free_agent",
        2,
        (
            "Give the open {subject} ticket of {customer} to the free agent of the {team} team.",
            "Someone free in the {team} team must take {customer}'s open {subject} ticket.",
        ),
        make_free_agent,
        solve_free_agent,
    ),
    TaskType(
        "if_high",
        2,
        (
            "If the open {subject} ticket of {customer} has high priority, set it to pending, otherwise close it.",
            "Set {customer}'s open {subject} ticket to pending if its priority is high, otherwise close it.",
        ),
        make_if_high,
        solve_if_high,
    ),
    TaskType(
        "hand_over",
        3,
        (
            "Give the open {subject} ticket of {customer} to {agent}. Answer with the name of the agent before.",
            "{agent} takes over {customer}'s open {subject} ticket. Answer with the name of the agent before.",
        ),
        make_hand_over,
        solve_hand_over,
    ),
    TaskType(
        "close_staffed",
        3,
        (
            "Close the open {subject} ticket of {customer}. If it has no agent, first give it to {agent}.",
            "{customer}'s open {subject} ticket is solved. Give it to {agent} if it has no agent, then close it.",
        ),
        make_close_staffed,
        solve_close_staffed,
    ),
)

"""``tickets``: a help desk."""

from __future__ import annotations

import random
from typing import Any, ClassVar

from megatron_fleet.embedded_fleet.tasktype import DONE, Choices, Goal, Row, Steps, TaskType
from megatron_fleet.embedded_fleet.world import PEOPLE, TEXT, ToolFailure, World, fresh_ids, one_of, table, tool
from megatron_fleet.envs.base import ToolCall

SUBJECTS = ("printer", "laptop", "network", "password", "email", "screen", "phone", "backup", "license", "keyboard")
TEAMS = ("office", "server", "mobile", "access")
STATUSES = ("open", "pending", "closed")
PRIORITIES = ("low", "high")
Fields = dict[str, Any] | None


class Tickets(World):
    env_key = "tickets"
    schema = """
    CREATE TABLE agents(id TEXT PRIMARY KEY, team TEXT, state TEXT);
    CREATE TABLE tickets(id TEXT PRIMARY KEY, customer TEXT, subject TEXT, status TEXT, priority TEXT, agent TEXT);
    """
    columns: ClassVar = {"agents": "id, team, state", "tickets": "id, customer, subject, status, priority, agent"}

    def populate(self, rng: random.Random) -> list[str]:
        """Two teams of three agents, one of them free; four customers with three tickets each."""
        people = rng.sample(PEOPLE, 11)
        agents, customers = people[:6], people[6:10]
        for team, members in zip(rng.sample(TEAMS, 2), (agents[:3], agents[3:]), strict=True):
            for name, state in zip(members, rng.sample(("free", "busy", "away"), 3), strict=True):
                self.db.execute("INSERT INTO agents VALUES (?,?,?)", (name, team, state))
        ids = iter(fresh_ids(rng, "T", 12))
        for customer in customers:
            kinds = [(s, rng.choice(("open", "open", "pending", "closed"))) for s in rng.sample(SUBJECTS, 3)]
            if rng.random() < 0.5:
                # The same subject once open, once closed: the status decides which ticket is meant.
                kinds[0], kinds[1] = (kinds[0][0], "open"), (kinds[0][0], "closed")
            rng.shuffle(kinds)
            for subject, status in kinds:
                agent = "none" if status != "closed" and rng.random() < 0.3 else rng.choice(agents)
                row = (next(ids), customer, subject, status, rng.choice(PRIORITIES), agent)
                self.db.execute("INSERT INTO tickets VALUES (?,?,?,?,?,?)", row)
        return [people[10], *customers, *agents]

    @tool("List a customer's tickets.", customer=TEXT)
    def search_tickets(self, customer: str) -> str:
        rows = self.query("SELECT subject, status, id, priority FROM tickets WHERE customer = ?", customer)
        return table("subject status id priority", rows)

    @tool("Show one ticket.", id=TEXT)
    def get_ticket(self, id: str) -> str:
        ticket = self.row("tickets", id, "ticket")
        return table("status priority agent", [(ticket["status"], ticket["priority"], ticket["agent"])])

    @tool("List a team's agents.", team=TEXT)
    def list_agents(self, team: str) -> str:
        return table("state name", self.query("SELECT state, id FROM agents WHERE team = ?", team))

    @tool("Change one field of a ticket.", id=TEXT, field=one_of("status", "priority", "agent"), value=TEXT)
    def update_ticket(self, id: str, field: str, value: str) -> str:
        ticket = self.row("tickets", id, "ticket")
        if ticket["status"] == "closed" and (field, value) != ("status", "open"):
            raise ToolFailure(f"{id} is closed")
        if field == "agent":
            agent = self.row("agents", value, "agent")
            if agent["state"] != "free":
                raise ToolFailure(f"{value} is {agent['state']}")
        elif value not in (STATUSES if field == "status" else PRIORITIES):
            raise ToolFailure(f"no such {field}", "invalid_args")
        elif value == "closed" and ticket["agent"] == "none":
            raise ToolFailure(f"{id} has no agent")
        self.db.execute(f"UPDATE tickets SET {field} = ? WHERE id = ?", (value, id))
        return f"{id} {field} {value}"


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

"""``tickets``: a help desk."""

from __future__ import annotations

import random
from typing import ClassVar

from megatron_fleet.embedded_fleet.world import PEOPLE, TEXT, ToolFailure, World, fresh_ids, one_of, table, tool

SUBJECTS = ("printer", "laptop", "network", "password", "email", "screen", "phone", "backup", "license", "keyboard")
TEAMS = ("office", "server", "mobile", "access")
STATUSES = ("open", "pending", "closed")
PRIORITIES = ("low", "high")


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

"""``ledger``: accounts and invoices."""

from __future__ import annotations

import random
from typing import Any, ClassVar

from megatron_fleet.embedded_fleet.world import INTEGER, PEOPLE, TEXT, ToolFailure, World, fresh_ids, table, tool

KINDS = ("daily", "savings", "travel", "tax", "joint", "gift")
VENDORS = ("Acme", "Nova", "Orbit", "Delta", "Pixel", "Zenith", "Lumen", "Fjord")
BALANCES = tuple(range(100, 400, 10))
AMOUNTS = tuple(range(10, 100, 10))


class Ledger(World):
    env_key = "ledger"
    schema = """
    CREATE TABLE accounts(id TEXT PRIMARY KEY, owner TEXT, kind TEXT, status TEXT, balance INTEGER);
    CREATE TABLE invoices(id TEXT PRIMARY KEY, vendor TEXT, status TEXT, amount INTEGER);
    """
    columns: ClassVar = {"accounts": "id, owner, kind, status, balance", "invoices": "id, vendor, status, amount"}

    def populate(self, rng: random.Random) -> list[str]:
        """Four owners with three accounts, one of the first resident's frozen; four vendors with their invoices."""
        owners = rng.sample(PEOPLE, 4)
        ids = iter(fresh_ids(rng, "A", 12))
        for owner in owners:
            frozen = rng.randrange(3) if owner == owners[0] or rng.random() < 0.3 else None
            balances = rng.sample(BALANCES, 3)
            for i, kind in enumerate(rng.sample(KINDS, 3)):
                status = "frozen" if i == frozen else "active"
                self.db.execute(
                    "INSERT INTO accounts VALUES (?,?,?,?,?)", (next(ids), owner, kind, status, balances[i])
                )
        ids = iter(fresh_ids(rng, "I", 12))
        for vendor in rng.sample(VENDORS, 4):
            statuses = rng.choice((["open", "paid"], ["open", "paid", "paid"]))
            rng.shuffle(statuses)
            for status, amount in zip(statuses, rng.sample(AMOUNTS, len(statuses)), strict=True):
                self.db.execute("INSERT INTO invoices VALUES (?,?,?,?)", (next(ids), vendor, status, amount))
        return owners

    @tool("List a person's accounts.", owner=TEXT)
    def list_accounts(self, owner: str) -> str:
        rows = self.query("SELECT kind, status, id, balance FROM accounts WHERE owner = ?", owner)
        return table("kind status id balance", rows)

    @tool("List a vendor's invoices.", vendor=TEXT)
    def list_invoices(self, vendor: str) -> str:
        rows = self.query("SELECT status, id, amount FROM invoices WHERE vendor = ?", vendor)
        return table("status id amount", rows)

    @tool("Move money between accounts.", source=TEXT, target=TEXT, amount=INTEGER)
    def transfer(self, source: str, target: str, amount: int) -> str:
        giver, taker = self._own(source, amount), self.row("accounts", target, "account")
        if taker["status"] == "frozen":
            raise ToolFailure(f"{target} is frozen")
        if source == target:
            raise ToolFailure("source is target", "invalid_args")
        self.db.execute("UPDATE accounts SET balance = balance - ? WHERE id = ?", (amount, source))
        self.db.execute("UPDATE accounts SET balance = balance + ? WHERE id = ?", (amount, target))
        return table("id balance", [(source, giver["balance"] - amount), (target, taker["balance"] + amount)])

    @tool("Pay an invoice from an account.", invoice=TEXT, account=TEXT)
    def pay_invoice(self, invoice: str, account: str) -> str:
        bill = self.row("invoices", invoice, "invoice")
        if bill["status"] == "paid":
            raise ToolFailure(f"{invoice} is paid")
        left = self._own(account, bill["amount"])["balance"] - bill["amount"]
        self.db.execute("UPDATE accounts SET balance = ? WHERE id = ?", (left, account))
        self.db.execute("UPDATE invoices SET status = 'paid' WHERE id = ?", (invoice,))
        return table("id balance", [(account, left)])

    def _own(self, account: str, amount: int) -> dict[str, Any]:
        """Return the user's active account, if its balance covers ``amount``; else raise ToolFailure."""
        row = self.row("accounts", account, "account")
        if row["owner"] != self.variables.get("LOGGED_IN_USER"):
            raise ToolFailure(f"{account} belongs to {row['owner']}")
        if row["status"] == "frozen":
            raise ToolFailure(f"{account} is frozen")
        if not 0 < amount <= row["balance"]:
            raise ToolFailure(f"{account} has {row['balance']}")
        return row

"""``ledger``: accounts and invoices."""

from __future__ import annotations

import random
from typing import Any, ClassVar

from megatron_fleet.embedded_fleet.tasktype import DONE, Choices, Goal, Steps, TaskType
from megatron_fleet.embedded_fleet.world import INTEGER, PEOPLE, TEXT, ToolFailure, World, fresh_ids, table, tool
from megatron_fleet.envs.base import ToolCall

KINDS = ("daily", "savings", "travel", "tax", "joint", "gift")
VENDORS = ("Acme", "Nova", "Orbit", "Delta", "Pixel", "Zenith", "Lumen", "Fjord")
BALANCES = tuple(range(100, 400, 10))
AMOUNTS = tuple(range(10, 100, 10))
Fields = dict[str, Any] | None


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


def _accounts(world: World, rng: random.Random, mine: bool, status: str = "active") -> list[dict[str, Any]]:
    """Return the accounts with this status, of the user or of another random owner, in random order."""
    user = world.variables["LOGGED_IN_USER"]
    owner = user if mine else rng.choice([p for p in world.residents if p != user])
    rows = world.query(
        "SELECT id, owner, kind, balance FROM accounts WHERE owner = ? AND status = ? ORDER BY id", owner, status
    )
    return [dict(zip(("id", "owner", "kind", "balance"), row, strict=True)) for row in rng.sample(rows, len(rows))]


def _open_invoice(world: World, rng: random.Random) -> dict[str, Any]:
    rows = world.query("SELECT id, vendor, amount FROM invoices WHERE status = 'open'")
    return dict(zip(("id", "vendor", "amount"), rng.choice(rows), strict=True))


def make_balance(world: World, rng: random.Random, goal: Goal) -> Fields:
    account = _accounts(world, rng, mine=False)[0]
    goal.answer = str(account["balance"])
    return {"owner": account["owner"], "kind": account["kind"]}


def solve_balance(c: Choices, owner: str, kind: str) -> Steps[str]:
    rows = yield from c.look("list_accounts", owner=c.value(owner, [c.user]))
    return c.row(rows, kind=kind)["balance"]


def make_frozen(world: World, rng: random.Random, goal: Goal) -> Fields:
    account = _accounts(world, rng, mine=True, status="frozen")[0]
    goal.answer = account["kind"]
    return {}


def solve_frozen(c: Choices) -> Steps[str]:
    rows = yield from c.look("list_accounts", owner=c.user)
    return c.row(rows, status="frozen")["kind"]


def make_pay(world: World, rng: random.Random, goal: Goal) -> Fields:
    account, invoice = _accounts(world, rng, mine=True)[0], _open_invoice(world, rng)
    goal.update("invoices", invoice["id"], status="paid")
    goal.update("accounts", account["id"], balance=account["balance"] - invoice["amount"])
    return {"vendor": invoice["vendor"], "kind": account["kind"]}


def solve_pay(c: Choices, vendor: str, kind: str) -> Steps[str]:
    invoices = yield from c.look("list_invoices", vendor=vendor)
    accounts = yield from c.look("list_accounts", owner=c.user)
    account = c.row(accounts, kind=kind)
    if not c.forgets():
        yield from c.act_on(
            invoices,
            {"status": "open"},
            lambda r: ToolCall("pay_invoice", {"invoice": r["id"], "account": account["id"]}),
        )
    return DONE


def make_pay_tell(world: World, rng: random.Random, goal: Goal) -> Fields:
    fields = make_pay(world, rng, goal)
    goal.answer = str(goal.added[-1][-1])
    return fields


def solve_pay_tell(c: Choices, vendor: str, kind: str) -> Steps[str]:
    invoices = yield from c.look("list_invoices", vendor=vendor)
    accounts = yield from c.look("list_accounts", owner=c.user)
    account, invoice = c.row(accounts, kind=kind), c.row(invoices, status="open")
    paid = yield from c.do("pay_invoice", invoice=invoice["id"], account=account["id"])
    return c.value(paid[0]["balance"], [account["balance"]])


def make_pay_fallback(world: World, rng: random.Random, goal: Goal) -> Fields:
    active, frozen = _accounts(world, rng, mine=True), _accounts(world, rng, mine=True, status="frozen")
    invoice = _open_invoice(world, rng)
    used = active[0]
    first, second = (frozen[0], used) if rng.random() < 0.5 else (used, rng.choice([active[1], frozen[0]]))
    goal.update("invoices", invoice["id"], status="paid")
    goal.update("accounts", used["id"], balance=used["balance"] - invoice["amount"])
    return {"vendor": invoice["vendor"], "kind": first["kind"], "other": second["kind"]}


def solve_pay_fallback(c: Choices, vendor: str, kind: str, other: str) -> Steps[str]:
    invoices = yield from c.look("list_invoices", vendor=vendor)
    accounts = yield from c.look("list_accounts", owner=c.user)
    account = c.row(accounts, kind=kind)
    if not c.holds(account["status"] == "active"):
        account = c.row(accounts, kind=other)
    invoice = c.row(invoices, status="open")
    yield from c.act("pay_invoice", invoice=invoice["id"], account=account["id"])
    return DONE


def make_send(world: World, rng: random.Random, goal: Goal) -> Fields:
    mine, theirs = _accounts(world, rng, mine=True)[0], _accounts(world, rng, mine=False)[0]
    amount = rng.randrange(10, 100, 10)
    goal.update("accounts", mine["id"], balance=mine["balance"] - amount)
    goal.update("accounts", theirs["id"], balance=theirs["balance"] + amount)
    return {"amount": amount, "kind": mine["kind"], "owner": theirs["owner"], "other": theirs["kind"]}


def solve_send(c: Choices, amount: str, kind: str, owner: str, other: str) -> Steps[str]:
    mine = yield from c.look("list_accounts", owner=c.user)
    theirs = yield from c.look("list_accounts", owner=owner)
    source, target = c.row(mine, kind=kind), c.row(theirs, kind=other)
    yield from c.act("transfer", source=source["id"], target=target["id"], amount=int(amount))
    return DONE


def make_shift(world: World, rng: random.Random, goal: Goal) -> Fields:
    accounts = _accounts(world, rng, mine=True)
    if len(accounts) < 2:
        return None
    source, target = accounts[:2]
    amount = rng.randrange(10, 100, 10)
    goal.update("accounts", source["id"], balance=source["balance"] - amount)
    goal.update("accounts", target["id"], balance=target["balance"] + amount)
    goal.answer = str(target["balance"] + amount)
    return {"amount": amount, "kind": source["kind"], "other": target["kind"]}


def solve_shift(c: Choices, amount: str, kind: str, other: str) -> Steps[str]:
    rows = yield from c.look("list_accounts", owner=c.user)
    source, target = c.row(rows, kind=kind), c.row(rows, kind=other)
    moved = yield from c.do("transfer", source=source["id"], target=target["id"], amount=int(amount))
    return c.row(moved, id=target["id"])["balance"]


TYPES = (
    TaskType(
        "balance",
        1,
        (
            "What is the balance of the {kind} account of {owner}? Answer with the number.",
            "Answer with the balance of {owner}'s {kind} account.",
        ),
        make_balance,
        solve_balance,
    ),
    TaskType(
        "frozen",
        1,
        (
            "Which of my accounts is frozen? Answer with its kind.",
            "One of my accounts is frozen. Answer with its kind.",
        ),
        make_frozen,
        solve_frozen,
    ),
    TaskType(
        "pay",
        2,
        (
            "Pay the open invoice of {vendor} from my {kind} account.",
            "Use my {kind} account to pay the open {vendor} invoice.",
        ),
        make_pay,
        solve_pay,
    ),
    TaskType(
        "shift",
        2,
        (
            "Move {amount} from my {kind} account to my {other} account. Answer with its new balance.",
            "My {kind} account gives {amount} to my {other} account. Answer with its new balance.",
        ),
        make_shift,
        solve_shift,
    ),
    TaskType(
        "send",
        3,
        (
            "Send {amount} from my {kind} account to the {other} account of {owner}.",
            "{owner}'s {other} account gets {amount} from my {kind} account.",
        ),
        make_send,
        solve_send,
    ),
    TaskType(
        "pay_tell",
        3,
        (
            "Pay the open invoice of {vendor} from my {kind} account. Answer with its new balance.",
            "Use my {kind} account to pay the open {vendor} invoice. Answer with its new balance.",
        ),
        make_pay_tell,
        solve_pay_tell,
    ),
    TaskType(
        "pay_fallback",
        3,
        (
            "Pay the open invoice of {vendor} from my {kind} account, or from my {other} account if that is frozen.",
            "Use my {kind} account, or if it is frozen my {other} account, to pay the open {vendor} invoice.",
        ),
        make_pay_fallback,
        solve_pay_fallback,
    ),
)

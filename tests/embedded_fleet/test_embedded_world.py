"""The embedded tools fail as real ones do, and a failed call changes nothing."""

import pytest

from megatron_fleet.embedded_fleet.tasks import WORLDS, EmbeddedSession, generate
from megatron_fleet.envs.base import ToolCall

TASKS = {t.env_key: t for t in generate(seed=11, per_env=4)}


@pytest.fixture
def session(request):
    return EmbeddedSession(TASKS[request.param])


def one(session, sql, *params):
    return session.world.query(sql, *params)[0][0]


def fails(session, kind, message, name, **arguments):
    before = session.world.current()
    shown = session.call(ToolCall(name, arguments))
    assert shown.error is not None
    assert (shown.error.kind, shown.content) == (kind, "")
    assert message in shown.error.message
    assert session.world.current() == before


@pytest.mark.parametrize("session", WORLDS, indirect=True)
def test_arguments_are_checked(session):
    fails(session, "tool_not_found", "no tool drop_all", "drop_all")
    tool = session.tools()[0]["function"]
    (name,) = tool["parameters"]["required"]
    fails(session, "invalid_args", name, tool["name"])
    fails(session, "invalid_args", "string", tool["name"], **{name: 3})
    fails(session, "invalid_args", "unknown argument limit", tool["name"], **{name: "x"}, limit=5)
    fails(session, "invalid_args", "", tool["name"], **{name: "\ud800"})


@pytest.mark.parametrize("session", WORLDS, indirect=True)
def test_tool_lists_are_short_enough_for_a_small_context(session):
    tools = [t["function"] for t in session.tools()]
    assert 4 <= len(tools) <= 6
    assert all(len(t["description"].split()) <= 8 for t in tools)
    assert session.call(ToolCall(tools[0]["name"], {tools[0]["parameters"]["required"][0]: "nobody"})).content == "none"


@pytest.mark.parametrize("session", ["tickets"], indirect=True)
def test_tickets_refusals(session):
    closed = one(session, "SELECT id FROM tickets WHERE status = 'closed'")
    opened = one(session, "SELECT id FROM tickets WHERE status = 'open'")
    busy = one(session, "SELECT id FROM agents WHERE state = 'busy'")
    session.world.db.execute("UPDATE tickets SET agent = 'none' WHERE id = ?", (opened,))
    fails(session, "execution_error", "no ticket T1", "get_ticket", id="T1")
    fails(session, "execution_error", f"{closed} is closed", "update_ticket", id=closed, field="priority", value="low")
    fails(session, "execution_error", f"{busy} is busy", "update_ticket", id=opened, field="agent", value=busy)
    fails(session, "execution_error", "no agent Bob", "update_ticket", id=opened, field="agent", value="Bob")
    fails(session, "execution_error", "has no agent", "update_ticket", id=opened, field="status", value="closed")
    fails(session, "invalid_args", "status", "update_ticket", id=opened, field="status", value="gone")
    reopened = session.call(ToolCall("update_ticket", {"id": closed, "field": "status", "value": "open"}))
    assert reopened.content == f"{closed} status open"
    fails(session, "execution_error", "no ticket ?", "get_ticket", id="?" * 500)
    assert len(session.call(ToolCall("get_ticket", {"id": "?" * 500})).error.message) <= 120


@pytest.mark.parametrize("session", ["booking"], indirect=True)
def test_booking_refusals(session):
    user = session.world.variables["LOGGED_IN_USER"]
    id, room, day, slot, guest = session.world.query("SELECT * FROM bookings WHERE guest != ?", user)[0]
    fails(session, "execution_error", f"{room} is taken", "book_room", room=room, day=day, slot=slot)
    fails(session, "execution_error", "no room R1", "book_room", room="R1", day=day, slot=slot)
    fails(session, "execution_error", "no bookings on sunday", "book_room", room=room, day="sunday", slot=slot)
    fails(session, "execution_error", "no slot midnight", "book_room", room=room, day=day, slot="midnight")
    fails(session, "execution_error", f"belongs to {guest}", "cancel_booking", id=id)
    fails(session, "execution_error", "no booking", "cancel_booking", id="B1")


@pytest.mark.parametrize("session", ["ledger"], indirect=True)
def test_ledger_refusals(session):
    user = session.world.variables["LOGGED_IN_USER"]
    mine, balance = session.world.query("SELECT id, balance FROM accounts WHERE owner = ? AND status = 'active'", user)[
        0
    ]
    frozen = one(session, "SELECT id FROM accounts WHERE owner = ? AND status = 'frozen'", user)
    theirs, owner = session.world.query("SELECT id, owner FROM accounts WHERE owner != ? AND status = 'active'", user)[
        0
    ]
    paid = one(session, "SELECT id FROM invoices WHERE status = 'paid'")
    unpaid = one(session, "SELECT id FROM invoices WHERE status = 'open'")
    fails(
        session, "execution_error", f"{mine} has {balance}", "transfer", source=mine, target=theirs, amount=balance + 1
    )
    fails(session, "execution_error", "has", "transfer", source=mine, target=theirs, amount=-5)
    fails(session, "execution_error", "has", "transfer", source=mine, target=theirs, amount=10**40)
    fails(session, "execution_error", f"belongs to {owner}", "transfer", source=theirs, target=mine, amount=1)
    fails(session, "execution_error", f"{frozen} is frozen", "transfer", source=mine, target=frozen, amount=1)
    fails(session, "execution_error", f"{frozen} is frozen", "pay_invoice", invoice=unpaid, account=frozen)
    fails(session, "execution_error", f"{paid} is paid", "pay_invoice", invoice=paid, account=mine)
    fails(session, "invalid_args", "source is target", "transfer", source=mine, target=mine, amount=1)


def test_every_seed_gives_worlds():
    # Booking takes 42 of the 90 ids, so some first digits run out in some worlds.
    for data_key in range(300):
        ids = WORLDS["booking"](f"w{data_key}", {}).query("SELECT id FROM bookings")
        assert len(ids) == len(set(ids))

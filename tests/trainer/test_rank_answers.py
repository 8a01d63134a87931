"""The rank's half of the protocol over a real connection: answers, failures by kind, late results, posted messages."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from concurrent.futures import Future
from dataclasses import asdict

import pytest
from waiting import HANG_S

from megatron_fleet.cluster import frames, handshake
from megatron_fleet.cluster.frames import FrameSocket
from megatron_fleet.cluster.inventory import Device, StartedRank
from megatron_fleet.config.errors import UserError
from megatron_fleet.trainer import rank
from megatron_fleet.trainer.links import Call, RankListener
from megatron_fleet.trainer.messages import OTHER, SYSTEM, USER, Identity

WHO = Identity(1, 2, 1, "host", 7, "srun", "10.0.0.1")


class Verbs:
    """What the rank does when it is asked; a model is not needed for the answers."""

    def __init__(self):
        self.late: Future[str] = Future()
        self.closed, self.asked = False, []

    def optim_step(self, adam, hold_above):
        return {"lr": adam["lr"], "above": hold_above}

    def load_state(self, path):
        raise {"user": UserError("name another folder"), "full": OSError("disk full"), "slow": TimeoutError("too slow"),
               "gone": ConnectionError("peer left"), "silent": KeyError()}[path]  # fmt: skip

    def written_state(self):
        return self.late

    def send_weights(self, version, options, outbox):
        receipts = [outbox.post({"version": version, "part": part}) for part in range(3)]
        with pytest.raises(TimeoutError, match=r"engines did not take a message within 0\.01 s"):
            receipts[2].wait(0.01)
        receipts[1].wait()
        receipts[0].wait(HANG_S)

    def close(self):
        self.closed = True


def connected():
    """Both ends of a TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    return ours, theirs


@pytest.fixture
def served(monkeypatch):
    """The controller's end of a rank that serves, and its verbs."""
    monkeypatch.setattr(rank, "_import_trainer", lambda: None)
    ours, theirs = connected()
    server, statuses = rank.RankServer(FrameSocket(theirs), WHO, "{}", "127.0.0.1"), []
    server._verbs = Verbs()
    serving = threading.Thread(target=lambda: statuses.append(server.serve()))
    serving.start()
    link = FrameSocket(ours)
    yield link, server
    with contextlib.suppress(OSError):
        link.write("quit")
    serving.join(HANG_S)
    ours.close()
    assert statuses == [0] and server._verbs.closed


def test_calls_are_answered_with_their_number_and_times(served):
    link, _ = served
    for number in (5, 3):
        link.write("call", number, "optim_step", {"adam": {"lr": 0.5}, "hold_above": 2.0}, 0)
        kind, call, value, began, seconds = link.read()
        assert (kind, call, value) == ("done", number, {"lr": 0.5, "above": 2.0})
        assert began > 1e9 and 0 <= seconds < HANG_S


@pytest.mark.parametrize(
    ("path", "failure"),
    [
        ("user", (USER, "name another folder", "UserError")),
        ("full", (SYSTEM, "disk full", "OSError")),
        ("slow", (OTHER, "too slow", "TimeoutError")),
        ("gone", (OTHER, "peer left", "ConnectionError")),
        ("silent", (OTHER, "KeyError", "KeyError")),
    ],
)
def test_a_failure_is_told_by_its_kind_and_the_rank_goes_on(served, path, failure):
    link, _ = served
    link.write("call", 1, "load_state", {"path": path}, 0)
    assert link.read() == ["failed", 1, *failure]
    link.write("call", 2, "optim_step", {"adam": {"lr": 1.0}, "hold_above": 0.0}, 0)
    assert link.read()[:2] == ["done", 2]


def test_before_it_is_built_a_rank_only_binds(served):
    link, server = served
    server._verbs, verbs = None, server._verbs
    link.write("call", 1, "load_state", {"path": "user"}, 0)
    assert link.read()[:4] == ["failed", 1, OTHER, "build comes first"]
    link.write("call", 2, "bind", {}, 0)
    kind, _, address, *_ = link.read()
    assert kind == "done"
    host, port = address.rsplit(":", 1)
    socket.create_connection((host, int(port)), timeout=HANG_S).close()
    server._listener.close()
    server._verbs = verbs


@pytest.mark.parametrize("error", [None, OSError("disk full"), UserError("no")])
def test_a_late_result_lets_other_calls_pass(served, error):
    link, server = served
    link.write("call", 1, "written_state", {}, 0)
    link.write("call", 2, "optim_step", {"adam": {"lr": 1.0}, "hold_above": 0.0}, 0)
    assert link.read()[:2] == ["done", 2]
    if error is None:
        server._verbs.late.set_result("files")
        assert link.read()[:3] == ["done", 1, "files"]
    else:
        server._verbs.late.set_exception(error)
        kind = USER if isinstance(error, UserError) else SYSTEM
        assert link.read() == ["failed", 1, kind, str(error), type(error).__name__]


@pytest.mark.parametrize("error", [None, "the engine refuses"])
def test_posted_messages_are_numbered_and_their_receipts_find_them(served, error):
    """In whatever order they come."""
    link, _ = served
    link.write("call", 9, "send_weights", {"version": 4, "options": {}}, 0)
    posts = [link.read() for _ in range(3)]
    assert [post[:2] for post in posts] == [["post", 9]] * 3
    assert [post[3] for post in posts] == [{"version": 4, "part": part} for part in range(3)]
    numbers = [post[2] for post in posts]
    assert len(set(numbers)) == 3
    link.write("delivered", 9, numbers[1], None)
    link.write("delivered", 9, numbers[0], error)
    expected = ["done", 9, None] if error is None else ["failed", 9, OTHER, error, "RuntimeError"]
    assert link.read()[: len(expected)] == expected


def test_a_rank_ends_at_once_when_its_controller_is_gone(monkeypatch):
    """Its main thread may be in a collective that never ends."""
    ended, left = [], threading.Event()
    monkeypatch.setattr(rank.os, "_exit", lambda status: (ended.append(status), left.set()))
    ours, theirs = connected()
    server = rank.RankServer(FrameSocket(theirs), WHO, "{}", "127.0.0.1")
    reading = threading.Thread(target=server._read)
    reading.start()
    ours.close()
    assert left.wait(HANG_S)
    reading.join(HANG_S)
    assert ended == [rank.CONTROLLER_GONE] and rank.CONTROLLER_GONE not in (0, 1, 2)
    theirs.close()


# Who a rank is


def test_an_identity_comes_back_and_anything_else_is_refused():
    device = asdict(Device(3, "GPU-x", "H100", 80 << 30))
    for who in (WHO, Identity(0, 1, 0, "h", 1, "mfleet", device=device)):
        assert Identity.from_plain(who.to_plain()) == who
    assert WHO.started() == StartedRank(1, 1, "host", "10.0.0.1", None)
    named = Identity(0, 1, 0, "h", 1, "mfleet", "10.0.0.2", device).started()
    assert named == StartedRank(0, 0, "h", "10.0.0.2", Device(3, "GPU-x", "H100", 80 << 30))
    for wrong in ({"rank": "1"}, {"pid": 1.5}, {"host": 3}, {"source": None}, {"address": 5}, {"more": 1}):
        with pytest.raises(ValueError):
            Identity.from_plain(WHO.to_plain() | wrong)
    with pytest.raises(ValueError):
        Identity.from_plain({"rank": 1})
    with pytest.raises(ValueError):
        Identity(0, 1, 0, "h", 1, "mfleet", device={"colour": "red"}).started()


# The controller's half


async def test_a_call_has_the_answers_by_rank_and_the_failure_that_explains_the_others():
    call = Call("save_state", 3, None)
    call.done(2, "c")
    call.done(0, "a")
    assert not call.complete and not call.result.done() and call.failure() is None
    call.done(1, "b")
    assert call.complete and call.result.result() == ["a", "b", "c"]
    call.fail(KeyError())
    assert call.result.result() == ["a", "b", "c"]

    call = Call("save_state", 4, None)
    call.failed(3, SYSTEM, "disk full", "OSError")
    assert call.failure() == (SYSTEM, "rank 3: save_state: OSError: disk full")
    call.failed(2, OTHER, "lost a peer", "RuntimeError")
    call.failed(1, OTHER, "no memory", "OutOfMemoryError")
    assert call.failure() == (OTHER, "rank 1: save_state: OutOfMemoryError: no memory")
    call.failed(0, USER, "lower it", "UserError")
    assert call.failure() == (USER, "lower it") and call.complete and not call.result.done()
    call.fail(UserError("lower it"))
    with pytest.raises(UserError):
        await call.result


async def dialled(listener, number, world=2):
    """A rank's connection, which has said who it is."""
    host, port = listener.address.rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))
    who = Identity(number, world, number, f"host {number}", 100 + number, "test")
    writer.write(frames.pack("rank", await handshake.dial(reader, writer, "secret"), who.to_plain()))
    return reader, writer


async def test_ranks_are_known_before_they_are_configured_and_in_their_order():
    listener = RankListener("secret", None, 2)
    await listener.listen("127.0.0.1", 0)
    try:
        (second, _), (first, writer) = await dialled(listener, 1), await dialled(listener, 0)
        found = await listener.who(HANG_S)
        assert [(who.rank, who.host) for who in found] == [(0, "host 0"), (1, "host 1")]
        listener.configure("{}")
        links = await listener.gather(HANG_S, lambda: None)
        assert [link.who.rank for link in links] == [0, 1] and not any(link.gone for link in links)
        assert [await frames.read(reader) for reader in (first, second)] == [["config", "{}"]] * 2
        writer.write(frames.pack("done", 1, None, 0.0, 0.0))
        assert await links[0].read() == ["done", 1, None, 0.0, 0.0]
        links[1].close()
        assert links[1].gone and await frames.read(second) is None
        # The next attempt's ranks have the places of these.
        await dialled(listener, 0)
        with pytest.raises(ConnectionError, match="host a is gone"):
            await listener.gather(HANG_S, lambda: "host a is gone")
    finally:
        listener.close()


async def test_an_address_that_is_taken_is_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=rf"cannot listen at 127\.0\.0\.1:{port} .*; free this address"):
            await RankListener("secret", "{}", 1).listen("127.0.0.1", port)

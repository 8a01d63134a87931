"""Broadcasts to engines that register and then are silent, or come under a wrong secret."""

from __future__ import annotations

import asyncio
from pathlib import Path
from unittest.mock import AsyncMock, Mock, call

import pytest

torch = pytest.importorskip("torch")

from local_sender import FolderWeights, LocalSender  # noqa: E402
from waiting import HANG_S  # noqa: E402
from weight_fixtures import random_tensors, tiny_config, write_folder  # noqa: E402

from megatron_fleet.weight_sync.broadcast import group as update_group  # noqa: E402
from megatron_fleet.weight_sync.broadcast.controller import ATTEMPTS  # noqa: E402
from megatron_fleet.weight_sync.broadcast.group import GroupBroken, Membership, Rendezvous  # noqa: E402
from megatron_fleet.weight_sync.registry import make_transport  # noqa: E402


class SilentEngines:
    """Register ``silent`` times, once for each time they are opened, and never come."""

    def __init__(self, silent: int) -> None:
        self.silent = silent
        self.calls: list[str] = []

    async def open_transport(self, init_info) -> None:
        self.calls.append("open")
        if self.silent:
            self.silent -= 1
            membership = await asyncio.to_thread(lambda: Membership(**init_info))
            await asyncio.to_thread(membership.register)

    async def begin_update(self) -> None:
        self.calls.append("begin")

    async def load(self, message) -> None:
        self.calls.append("load")

    async def finish_update(self, version, message) -> None:
        self.calls.append("finish")


@pytest.fixture
def sender(tmp_path: Path):
    config = tiny_config()
    made = LocalSender(FolderWeights(write_folder(tmp_path / "hf", config, random_tensors(config))))
    yield made
    made.close()


@pytest.fixture
def impatient(monkeypatch):
    """Rank 0 waits a moment for engines that have registered; who connects to it has the time that it needs."""
    meet = Rendezvous.meet

    def meet_now(self):
        with monkeypatch.context() as patch:
            patch.setattr(update_group, "JOIN_S", 0.2)
            return meet(self)

    monkeypatch.setattr(Rendezvous, "meet", meet_now)


@pytest.mark.parametrize("silent", [2, ATTEMPTS])
async def test_the_trainer_waits_for_a_silent_engine_so_long_and_no_longer(sender, impatient, silent):
    engines, transport = SilentEngines(silent), make_transport("gloo", {"address": "127.0.0.1"})
    if silent == ATTEMPTS:
        words = f"version 4 were not received in {ATTEMPTS} attempts: not all 1 registered engine .*timeout after 200ms"
        with pytest.raises(RuntimeError, match=words):
            await transport.sync(sender, engines, 4)
        assert engines.calls == ["open", "begin", "load", *["open", "load"] * (ATTEMPTS - 1)]
    else:
        await transport.sync(sender, engines, 4)
        assert engines.calls == ["open", "begin", "load", *["open", "load"] * silent, "finish"]


async def test_an_update_inside_another_one_waits_for_its_turn_and_no_more(sender):
    """Whoever replaces a lost engine asks for the version again before the update of the others is finished."""
    transport = make_transport("gloo", {"address": "127.0.0.1"})
    engines, replaced = SilentEngines(0), SilentEngines(0)

    async def finish(version, message):
        await transport.sync(sender, replaced, version)

    engines.finish_update = finish
    await asyncio.wait_for(transport.sync(sender, engines, 1), HANG_S)
    assert replaced.calls == ["open", "begin", "load", "finish"]


async def test_an_update_does_not_use_what_the_last_one_left(sender, monkeypatch):
    """Neither its rendezvous nor, when all engines are gone, its group, whose broadcasts nobody would receive."""
    options = {"address": "127.0.0.1"}
    old = await sender.prepare_weights("gloo", options)
    group = sender.sender._group = Mock()
    new = await sender.prepare_weights("gloo", options)
    Membership(**new)
    monkeypatch.setattr(update_group, "JOIN_S", 0.5)
    with pytest.raises((ConnectionRefusedError, RuntimeError)):  # the second where the system gave the port again
        Membership(**old)
    await sender.send_weights(2, {}, AsyncMock())
    assert group.mock_calls == [call.close()]


def test_members_meet_only_those_who_know_the_secret(monkeypatch):
    meeting = Rendezvous("127.0.0.1", "the layout")
    member = Membership(**meeting.init_info)
    assert (member.layout, member.own_address) == ("the layout", "127.0.0.1")
    monkeypatch.setattr(update_group, "JOIN_S", 0.5)
    with pytest.raises(RuntimeError, match=r"(?i)timeout|timed out"):
        Membership(**meeting.init_info | {"secret": "another"})
    member.register()
    with pytest.raises(GroupBroken, match="not all 1 registered engine workers"):
        meeting.meet()


def test_a_member_notices_at_once_that_rank_0_is_gone(monkeypatch):
    monkeypatch.setattr(update_group, "OPEN_S", HANG_S)
    meeting = Rendezvous("127.0.0.1", "the layout")
    member = Membership(**meeting.init_info)
    member.register()
    meeting.store = None
    with pytest.raises(GroupBroken, match="rank 0 of the trainer did not connect") as broken:
        member.meet()
    assert "timeout" not in str(broken.value)

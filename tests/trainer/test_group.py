"""The controller's half of a trainer: who may be a rank, the order of calls, what is sent, and losses of ranks."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from emulated_ranks import EmulatedRank
from policy_fixtures import make_batch, make_config, write_config
from waiting import HANG_S, until

from megatron_fleet.cluster import frames, handshake
from megatron_fleet.cluster.launcher import ExternalRanks
from megatron_fleet.cluster.rank_identity import controller_address, run_token
from megatron_fleet.config.errors import UserError
from megatron_fleet.config.schema import Config
from megatron_fleet.models.flops import SequenceCost
from megatron_fleet.platform.timeline import TIMELINE
from megatron_fleet.trainer.base import AdamParams, LossSpec, TrainerLost
from megatron_fleet.trainer.group import TrainerGroup, open_trainer
from megatron_fleet.trainer.links import RankListener

TOKEN = "the run's token"


def configured(tmp_path, **sections):
    tree = make_config(write_config(tmp_path / "model")).model_dump()
    tree["run"] |= {"out": str(tmp_path / "out")}
    for name, changes in sections.items():
        tree[name] |= changes
    return Config.model_validate(tree)


@contextlib.asynccontextmanager
async def emulated(config, world, tensor=1, rank_type=EmulatedRank):
    """A group over emulated ranks, and these."""
    listener = RankListener(TOKEN, "{}", world)
    await listener.listen("127.0.0.1", 0)
    ranks = [rank_type(rank, world, tensor) for rank in range(world)]
    group = TrainerGroup(config, listener, ExternalRanks(Path("logs")), TOKEN, SequenceCost(1.0, 1e-3, 1.0))
    serving = []
    try:
        gathering = asyncio.create_task(group.gather())
        for rank in ranks:
            assert await rank.dial(listener.address, TOKEN)
            serving.append(asyncio.create_task(rank.serve()))
        await gathering
        await group.build()
        yield group, ranks
    finally:
        await group.close()
        await asyncio.gather(*serving)


async def test_each_replica_is_sent_its_data_once(tmp_path):
    data = make_batch(count=9, seed=1)
    async with emulated(configured(tmp_path), world=6, tensor=3) as (group, ranks):
        await group.forward_backward(data, LossSpec.of(group._config.algorithm))
        plan = group.plan(data)
    assert sorted(i for replica in plan for members in replica for i in members) == list(range(9))
    assert [rank.data_bytes > 0 for rank in ranks] == [True, False, False, True, False, False]
    arrays = [getattr(d, n) for d in data for n in ("token_ids", "scaled_advantages", "behaviour_logprobs")]
    assert sum(rank.data_bytes for rank in ranks) < 1.3 * sum(array.nbytes for array in arrays)
    assert all(rank.calls == ["build", "forward_backward"] for rank in ranks[1:])


async def test_calls_run_in_the_order_in_which_they_were_made(tmp_path):
    class Slow(EmulatedRank):
        async def serve(self):
            await asyncio.sleep(0.05 * self.rank)
            await super().serve()

    TIMELINE.reset(trace_every=1)
    async with emulated(configured(tmp_path), world=3, rank_type=Slow) as (group, ranks):
        steps = [group.optim_step(AdamParams(1.0)), group.discard_gradients(), group.optim_step(AdamParams(2.0))]
        first, _, second = await asyncio.gather(*steps)
    assert (first.lr, second.lr) == (1.0, 2.0)
    TIMELINE.begin_step(0)
    TIMELINE.end_step()
    slices = TIMELINE.traced.popleft().slices
    TIMELINE.reset(0)
    for rank in ranks:
        assert rank.calls[-3:] == ["optim_step", "discard_gradients", "optim_step"]
        own = [each.name for each in slices if (each.group, each.lane) == ("trainer", f"rank {rank.rank}")]
        assert own == rank.calls


async def test_only_ranks_of_this_run_are_let_in():
    listener = RankListener(TOKEN, "{}", 2)
    await listener.listen("127.0.0.1", 0)

    async def answer(kind, *rest):
        host, port = listener.address.rsplit(":", 1)
        reader, writer = await asyncio.open_connection(host, int(port))
        with contextlib.closing(writer):
            writer.write(frames.pack(kind, await handshake.dial(reader, writer, TOKEN), *rest))
            return await asyncio.wait_for(frames.read(reader), HANG_S)

    def who(rank=0, world=2, **more):
        return {"rank": rank, "world_size": world, "local_rank": 0, "host": "h", "pid": 1, "source": "srun"} | more

    try:
        with pytest.raises(handshake.NotOfThisRun):
            await EmulatedRank(0, 2, 1).dial(listener.address, "another token")
        assert await answer("rank", {"rank": "0"}) is None
        assert await answer("rank") is None
        assert await answer("GET / HTTP/1.1") is None
        refused = [await answer("rank", who(**bad)) for bad in ({"world": 4}, {"rank": 2}, {"rank": -1})]
        assert [kind for kind, _ in refused] == ["refused"] * 3
        assert "4 ranks were started (srun), but parallel.tensor" in refused[0][1]
        there = EmulatedRank(1, 2, 1)
        assert await there.dial(listener.address, TOKEN)
        kind, reason = await answer("rank", who(rank=1))
        assert kind == "refused" and "is there already, on host emulated" in reason
        with pytest.raises(
            ConnectionError, match=r"1 of 2 ranks did not connect to .* within 0.3 s .* the first is rank 0"
        ):
            await listener.gather(0.3, lambda: None)
    finally:
        listener.close()


async def test_a_host_that_is_lost_during_the_start_is_a_lost_trainer(tmp_path):
    class Leaving(ExternalRanks):
        async def start(self, address, token):
            raise ConnectionError("host b was lost while the ranks were started")

    listener = RankListener(TOKEN, "{}", 1)
    await listener.listen("127.0.0.1", 0)
    cost = SequenceCost(1.0, 1e-3, 1.0)
    group = TrainerGroup(configured(tmp_path), listener, Leaving(Path("logs")), TOKEN, cost)
    try:
        with pytest.raises(TrainerLost, match="host b was lost"):
            await group.gather()
    finally:
        await group.close()


async def test_a_call_that_is_cancelled_while_it_is_sent_leaves_nothing(tmp_path, monkeypatch):
    async with emulated(configured(tmp_path), world=1) as (group, _):
        sending = asyncio.Event()

        async def send(*frame):
            sending.set()
            await asyncio.Event().wait()

        with monkeypatch.context() as patched:
            patched.setattr(group._links[0], "send", send)
            call = asyncio.create_task(group.discard_gradients())
            await sending.wait()
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
        assert group._calls == {}
        await group.discard_gradients()


def test_white_space_around_the_token_is_no_part_of_it(monkeypatch):
    monkeypatch.setenv("MFLEET_TOKEN", " secret\n")
    monkeypatch.setenv("MFLEET_CONTROLLER", "h:1")
    assert run_token(os.environ) == controller_address(os.environ)[1] == "secret"


OUT_OF_MEMORY, FULL = ("other", "no memory", "OutOfMemoryError"), ("system", "disk full", "OSError")
TOO_LARGE = ("user", "lower policy.micro_batch_tokens", "UserError")


@pytest.mark.parametrize(
    ("failures", "error", "text"),
    [
        ({0: OUT_OF_MEMORY, 1: TOO_LARGE}, UserError, "lower policy.micro_batch_tokens"),
        ({1: OUT_OF_MEMORY}, TrainerLost, "rank 1: optim_step: OutOfMemoryError: no memory"),
        ({0: FULL, 1: FULL}, OSError, "disk full"),
        ({0: FULL}, TrainerLost, "disk full"),
    ],
)
async def test_failures_of_ranks_are_told_apart(tmp_path, monkeypatch, failures, error, text):
    # A rank that hangs in a collective says nothing, however long one waits.
    monkeypatch.setattr("megatron_fleet.trainer.group.LAST_WORDS_S", HANG_S if len(failures) == 2 else 0.3)

    class Failing(EmulatedRank):
        async def serve(self):
            while (frame := await frames.read(self._reader)) is not None and frame[0] != "quit":
                _, call, verb, arguments, _ = frame
                if verb != "optim_step":
                    self._writer.write(frames.pack("done", call, self._answer(verb, arguments, []), 0.0, 0.0))
                elif self.rank in failures:
                    self._writer.write(frames.pack("failed", call, *failures[self.rank]))
                # else it hangs in a collective
            self._writer.close()

    async with emulated(configured(tmp_path), world=2, rank_type=Failing) as (group, _):
        with pytest.raises(error, match=text):
            await group.optim_step(AdamParams(1.0))
        if error is TrainerLost:
            assert text in str(await asyncio.wait_for(group.lost(), HANG_S))
            with pytest.raises(TrainerLost):
                await group.discard_gradients()
        else:
            await group.discard_gradients()


async def test_ranks_that_still_write_are_waited_for_when_the_disk_refuses_one(tmp_path, monkeypatch):
    """A full disk is no loss of the trainer, however much longer the others write."""
    monkeypatch.setattr("megatron_fleet.trainer.group.LAST_WORDS_S", 0.0)
    written = asyncio.Event()

    class Writing(EmulatedRank):
        async def serve(self):
            while (frame := await frames.read(self._reader)) is not None and frame[0] != "quit":
                _, call, verb, arguments, _ = frame
                if verb == "written_state" and self.rank == 0:
                    self._writer.write(frames.pack("failed", call, *FULL))
                    continue
                if verb == "written_state":
                    await written.wait()
                self._writer.write(frames.pack("done", call, self._answer(verb, arguments, []), 0.0, 0.0))
            self._writer.close()

    async with emulated(configured(tmp_path), world=2, rank_type=Writing) as (group, _):
        writing = await group.copy_state(tmp_path)
        await until(lambda: writing.done() or any(call.failure() for call in group._calls.values()))
        for _ in range(5):
            await asyncio.sleep(0.02)  # as often as the group looks
        written.set()
        with pytest.raises(OSError, match="disk full"):
            await writing
        await group.discard_gradients()


async def test_a_lost_rank_is_known_from_its_connection_and_not_from_a_timer(tmp_path, monkeypatch):
    class Hanging(EmulatedRank):
        async def serve(self):
            while (frame := await frames.read(self._reader)) is not None and frame[0] != "quit":
                _, call, verb, arguments, _ = frame
                if verb != "optim_step":
                    self._writer.write(frames.pack("done", call, self._answer(verb, arguments, []), 0.0, 0.0))
                elif self.rank == 1:
                    break  # it is killed in a collective, in which the others hang
            self._writer.close()

    async with emulated(configured(tmp_path), world=3, rank_type=Hanging) as (group, _):
        loop, end = asyncio.get_running_loop(), time.monotonic() + HANG_S
        with monkeypatch.context() as patched:
            patched.setattr(loop, "call_at", lambda when, call, *a, **_: asyncio.TimerHandle(when, call, a, loop))
            step, lost = asyncio.create_task(group.optim_step(AdamParams(1.0))), asyncio.create_task(group.lost())
            while not (step.done() and lost.done()):
                assert time.monotonic() < end, "it waits for a timer, and no timer ever ends here"
                await asyncio.sleep(0)
        assert "rank 1 closed its connection" in str(lost.result())
        assert step.exception() is lost.result()


@pytest.mark.parametrize("message", [("done",), ("done", 0), ("post", 0), ("failed", 0), ("done", [])], ids=str)
async def test_a_rank_that_does_not_keep_to_the_protocol_is_lost(tmp_path, message):
    class Strange(EmulatedRank):
        async def serve(self):
            while (frame := await frames.read(self._reader)) is not None and frame[0] != "quit":
                _, call, verb, arguments, _ = frame
                kind, *rest = message if verb == "optim_step" else ("done", 0, self._answer(verb, arguments, []), 0, 0)
                self._writer.write(frames.pack(kind, *[call if item == 0 else item for item in rest[:1]], *rest[1:]))
            self._writer.close()

    async with emulated(configured(tmp_path), world=2, rank_type=Strange) as (group, _):
        with pytest.raises(TrainerLost, match=r"rank \d sent a message that is not part of the protocol"):
            await asyncio.wait_for(group.optim_step(AdamParams(1.0)), HANG_S)


async def test_messages_for_engines_arrive_in_order_and_are_confirmed(tmp_path):
    class Sending(EmulatedRank):
        async def serve(self):
            while (frame := await frames.read(self._reader)) is not None and frame[0] != "quit":
                _, call, verb, arguments, _ = frame
                if verb == "send_weights" and self.rank == 0:
                    for number in range(3):
                        self._writer.write(frames.pack("post", call, number, {"bucket": number}))
                    self.confirmed = [(await frames.read(self._reader))[2:] for _ in range(3)]
                self._writer.write(frames.pack("done", call, self._answer(verb, arguments, []), 0.0, 0.0))
            self._writer.close()

    delivered = []

    async def deliver(message):
        await asyncio.sleep(0.03 - 0.01 * message["bucket"])
        delivered.append(message["bucket"])

    async with emulated(configured(tmp_path), world=2, rank_type=Sending) as (group, ranks):
        await group.send_weights(7, {}, deliver)
    assert delivered == [0, 1, 2]
    assert ranks[0].confirmed == [[0, None], [1, None], [2, None]]


async def trains_while_its_copy_is_written(trainer, folder, files):
    """What is written is the state at the time of the copy."""
    (folder / "copy").mkdir()
    writing = await trainer.copy_state(folder / "copy")
    await trainer.forward_backward(make_batch(count=4), LossSpec.of(trainer._config.algorithm))
    assert not (await trainer.optim_step(AdamParams(1.0))).skipped
    assert await writing == files
    assert {p.relative_to(folder / "copy").as_posix() for p in (folder / "copy").rglob("*")} == files.keys()
    writing = await trainer.copy_state(Path("/proc/none"))
    with pytest.raises(OSError, match="written_state"):
        await writing


@pytest.mark.slow
def test_real_ranks_save_in_the_background_and_are_replaced_when_killed(tmp_path):
    pytest.importorskip("megatron.core")
    config = configured(tmp_path, cluster={"max_restarts": 1}, parallel={"data": 2})
    data = make_batch(count=4, seed=1)
    state = tmp_path / "state"
    state.mkdir()

    async def story():
        async with open_trainer(config, "random") as trainer:
            before = await trainer.forward(data)
            files = await trainer.save_state(state)
            assert files.keys() == {p.relative_to(state).as_posix() for p in state.rglob("*") if p.is_file()}
            for one, two in zip(before, await trainer.forward(data), strict=True):
                np.testing.assert_array_equal(one, two)
            with pytest.raises(OSError, match="save_state"):
                await trainer.save_state(Path("/proc/none"))
            await trainer.forward(data)  # a failure of the file system is not a loss
            await trains_while_its_copy_is_written(trainer, tmp_path, files)
            await trainer.forward(data)
            os.kill(trainer._starter.pids[1], signal.SIGKILL)
            reason = await asyncio.wait_for(trainer.lost(), HANG_S)
            assert "rank 1 was killed by SIGKILL" in str(reason)
            with pytest.raises(TrainerLost):
                await trainer.forward(data)
            pids = trainer._starter.pids
            await trainer.restart(reason)
            assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
            await trainer.load_state(state)
            for one, two in zip(before, await trainer.forward(data), strict=True):
                np.testing.assert_array_equal(one, two)
            os.kill(trainer._starter.pids[0], signal.SIGKILL)
            with pytest.raises(UserError, match=r"the trainer died 2 times, last: rank 0 was killed by SIGKILL"):
                await trainer.restart(await trainer.lost())

    asyncio.run(story())


@pytest.mark.slow
def test_a_layout_that_does_not_fit_is_one_sentence(tmp_path):
    pytest.importorskip("megatron.core")
    config = configured(tmp_path, parallel={"tensor": 2})
    file = tmp_path / "model" / "config.json"
    file.write_text(re.sub(r'("num_(attention|key_value)_heads"): \d+', r"\1: 3", file.read_text()))

    async def open_it():
        async with open_trainer(config, "random"):
            pass

    with pytest.raises(UserError, match=r"parallel\.tensor=2"):
        asyncio.run(open_it())

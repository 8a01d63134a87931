"""What ranks of several replicas and stages answer is put together in the order of the data."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import numpy as np
import pytest
from policy_fixtures import make_batch, make_config, write_config
from waiting import until

from megatron_fleet.algorithms.datum import Datum
from megatron_fleet.cluster import frames, handshake, restarts
from megatron_fleet.cluster.launcher import ExternalRanks
from megatron_fleet.config.errors import UserError
from megatron_fleet.config.schema import Config
from megatron_fleet.models.flops import SequenceCost
from megatron_fleet.trainer.base import LossReport, LossSpec, TrainerLost, as_plain
from megatron_fleet.trainer.group import TrainerGroup
from megatron_fleet.trainer.links import RankListener
from megatron_fleet.trainer.messages import Identity, RankReady, datum_from_plain, results_to_plain

TOKEN = "the run's token"
STAGES, REPLICAS = 2, 3
DATA = make_batch(count=11, longest=80, seed=3)


def value(datum: Datum) -> float:
    """What the ranks compute of a sequence."""
    return float(datum.token_ids.sum() % 1000)


class Rank:
    """Its replica's ranks are stages of a pipeline: only the last one knows losses, only the first one is sent data."""

    def __init__(self, number: int) -> None:
        self.number, self.stage, self.replica = number, number // REPLICAS, number % REPLICAS
        self.held: list[list[Datum]] = []

    async def serve(self, address: str, shares: dict[int, list[list[Datum]]], host: str) -> None:
        where, port = address.rsplit(":", 1)
        reader, writer = await asyncio.open_connection(where, int(port), limit=64 << 20)
        proof = await handshake.dial(reader, writer, TOKEN)
        who = Identity(self.number, STAGES * REPLICAS, self.number, host, 100 + self.number, "test")
        writer.write(frames.pack("rank", proof, who.to_plain()))
        assert (await frames.read(reader))[0] == "config"
        while (frame := await frames.read(reader)) is not None and frame[0] != "quit":
            _, call, verb, arguments, following = frame
            bodies = [(await frames.read(reader))[-1] for _ in range(following)]
            mine = [[datum_from_plain(plain) for plain in frames.unpack(body)[1:]] for body in bodies]
            if "micro_batches" in arguments:
                assert len(mine) == (arguments["micro_batches"] if self.stage == 0 else 0)
                if self.stage == 0:
                    shares[self.replica] = mine
                while self.replica not in shares:
                    await asyncio.sleep(0.01)
                self.held = shares[self.replica]
            answer = self.answer(verb, arguments)
            if verb in ("forward", "forward_backward") and self.stage == STAGES - 1:
                del shares[self.replica]
            writer.write(frames.pack("done", call, answer, 0.0, 0.0))
        writer.close()

    def answer(self, verb, arguments):
        last = self.stage == STAGES - 1
        if verb == "bind":
            return "127.0.0.1:1"
        if verb == "build":
            return as_plain(RankReady(self.replica, REPLICAS, 511, "cpu", {}, sees_folder=self.number != 4))
        if verb == "forward":
            if self.stage > 0:
                return None
            rows = [[np.where(d.loss_mask, value(d), 0).astype(np.float32) for d in each] for each in self.held]
            return [results_to_plain(*pair) for pair in zip(self.held, rows, strict=True)]
        if verb == "forward_backward":
            # The rank of an interleaved pipeline has an empty micro-batch more.
            losses = [[value(d) for d in each] for each in self.held] + [[]]
            return {"report": as_plain(LossReport(7.0, {"n": 1.0})), "sequences": losses if last else None}
        if verb == "examine":
            found = [sum(value(d) for d in each) for each in self.held] if last else []
            return {"faults": {"weights": ["w"], "gradients": [], "parameters": 9}, "micro_batches": found}
        if verb == "send_state":
            return [f"file {self.number}"] if self.number in arguments["ranks"] else []
        return None


@contextlib.asynccontextmanager
async def opened(tmp_path, hosts=("a",), **cluster):
    tree = make_config(write_config(tmp_path / "model")).model_dump()
    tree["run"] |= {"out": str(tmp_path / "out")}
    tree["policy"] |= {"micro_batch_tokens": 128}
    tree["cluster"] |= cluster
    listener = RankListener(TOKEN, "{}", STAGES * REPLICAS)
    await listener.listen("127.0.0.1", 0)
    cost = SequenceCost(1.0, 1e-3, 1.0)
    group = TrainerGroup(Config.model_validate(tree), listener, ExternalRanks(Path("logs")), TOKEN, cost)
    serving = []

    def dial():
        shares: dict[int, list[list[Datum]]] = {}
        ranks = [Rank(number) for number in range(STAGES * REPLICAS)]
        serving.extend(
            asyncio.create_task(rank.serve(listener.address, shares, hosts[rank.number % len(hosts)])) for rank in ranks
        )

    group.dial = dial
    dial()
    try:
        await group.gather()
        await group.build()
        yield group
    finally:
        await group.close()
        await asyncio.gather(*serving)


async def test_results_are_those_of_each_sequence(tmp_path):
    expected = [value(datum) for datum in DATA]
    assert len(set(expected)) == len(expected)
    async with opened(tmp_path) as group:
        assert group.info.replicas == REPLICAS and group.info.hosts_apart
        plan = group.plan(DATA)
        assert len(plan) == REPLICAS and sum(map(len, plan)) > REPLICAS
        assert sorted(i for replica in plan for members in replica for i in members) == list(range(len(DATA)))
        for found, datum, wanted in zip(await group.forward(DATA), DATA, expected, strict=True):
            assert found.tolist() == np.where(datum.loss_mask, wanted, 0).tolist()
        report = await group.forward_backward(DATA, LossSpec("ppo_clip", {}, per_sequence=True))
        assert report.sequence_losses == expected and report.loss == 7.0 and report.metrics == {"n": 1.0}
        examined = await group.examine()
        assert examined.weights == ["w"] and examined.parameters == 9
        found = {tuple(one.sequences): one.loss for one in examined.micro_batches}
        assert found == {
            tuple(members): sum(expected[i] for i in members) for replica in plan for members in replica if members
        }
        assert (await group.forward_backward(DATA, LossSpec("ppo_clip", {}))).sequence_losses is None


async def test_processes_are_told_by_host_and_ranks_elsewhere_send_what_they_wrote(tmp_path, monkeypatch):
    """A limit of bytes is for all hosts together, this one included."""
    async with opened(tmp_path, hosts=("here", "there")) as group:
        assert group.processes == [("here" if i % 2 == 0 else "there", 100 + i) for i in range(6)]
        sent = []
        call = group._call

        async def record(verb, arguments):
            sent.append(arguments)
            return await call(verb, arguments)

        monkeypatch.setattr(group, "_call", record)
        monkeypatch.setattr("socket.gethostname", lambda: "here")
        names = await group.send_state(tmp_path, "s3://b/x", {"f": 3}, 1000.0)
        assert list(names) == ["file 1", "file 3", "file 5"]
        assert sent[-1]["bytes_per_s"] == 250.0 and sent[-1]["ranks"] == [1, 3, 5]
        await group.send_state(tmp_path, "s3://b/x", {"f": 3}, None)
        assert sent[-1]["bytes_per_s"] is None and sent[-1]["sizes"] == {"f": 3}
    async with opened(tmp_path, hosts=("here",)) as group:
        monkeypatch.setattr(group, "_call", None)
        assert list(await group.send_state(tmp_path, "s3://b/x", {"f": 3}, 1000.0)) == []


async def test_a_rank_that_leaves_fails_what_is_asked_later(tmp_path):
    async with opened(tmp_path) as group:
        asking = asyncio.create_task(group.lost())
        await asyncio.sleep(0)
        assert not asking.done()
        group._links[2].close()
        assert str(await asking).startswith("rank 2 closed its connection; see logs/rank_2.log")
        with pytest.raises(TrainerLost, match="rank 2 closed"):
            await group.forward(DATA)
        assert group.processes == []


async def test_lost_ranks_are_replaced_until_they_die_too_often(tmp_path, monkeypatch):
    monkeypatch.setattr(restarts, "BACKOFF_S", 1e-3)
    async with opened(tmp_path, max_restarts=1) as group:
        expected = await group.forward(DATA)
        group._links[0].close()
        lost = await group.lost()
        assert group.restarts.count == 0
        starting = asyncio.create_task(group.start(lost))
        await until(lambda: group.restarts.count == 1)
        group.dial()
        await starting
        assert all(np.array_equal(a, b) for a, b in zip(await group.forward(DATA), expected, strict=True))
        asking = asyncio.create_task(group.lost())
        await asyncio.sleep(0)
        assert not asking.done(), "those of the first attempt are forgotten"
        group._links[1].close()
        with pytest.raises(
            UserError, match=r"the trainer died 2 times, last: rank 1 closed .* resumes from the newest"
        ):
            await group.start(await asking)

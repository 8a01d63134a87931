"""A whole trainer in this process: the controller's group, and the one rank of it in a thread, on a real model."""

from __future__ import annotations

import contextlib
import math
import os
import socket
import threading
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest

pytest.importorskip("megatron_fleet.trainer.megatron")

import numpy as np
from policy_fixtures import make_batch, make_config, write_config
from safetensors.torch import load_file

from megatron_fleet.algorithms.losses import make_loss
from megatron_fleet.cluster.frames import FrameSocket
from megatron_fleet.cluster.launcher import ExternalRanks
from megatron_fleet.config.schema import Config
from megatron_fleet.models.flops import SequenceCost
from megatron_fleet.trainer import rank
from megatron_fleet.trainer.base import AdamParams, LossSpec
from megatron_fleet.trainer.group import TrainerGroup
from megatron_fleet.trainer.links import RankListener
from megatron_fleet.trainer.megatron.policy import MegatronPolicy
from megatron_fleet.trainer.messages import Identity

TOKEN = "the run's token"
DATA = make_batch(count=7, longest=60)
ADAM = AdamParams(1e-2, betas=(0.9, 0.95), clip_grad=0.5, weight_decay=0.1)


def configured(tmp_path, **sections):
    tree = make_config(write_config(tmp_path / "model", num_hidden_layers=2), micro_batch_tokens=128).model_dump()
    tree["run"] |= {"out": str(tmp_path / "out")}
    for name, changes in sections.items():
        tree[name] |= changes
    return Config.model_validate(tree)


def serve(address, statuses):
    """Be the rank, as its process is after it has been started."""
    connection = rank._dial(address)
    link = FrameSocket(connection)
    who = Identity(0, 1, 0, socket.gethostname(), os.getpid(), "mfleet", connection.getsockname()[0])
    rank._say_hello(link, TOKEN, who, address)
    kind, config = link.read()
    assert kind == "config"
    statuses.append(rank.RankServer(link, who, config, "127.0.0.1").serve())


@pytest.fixture
def started(monkeypatch):
    """Opens a trainer; leaving it ends the rank."""
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "lo")
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("MFLEET_TOKEN", TOKEN)

    @contextlib.asynccontextmanager
    async def start(config):
        listener, statuses = RankListener(TOKEN, config.model_dump_json(), 1), []
        await listener.listen("127.0.0.1", 0)
        monkeypatch.setenv("MFLEET_CONTROLLER", listener.address)
        cost = SequenceCost(1.0, 1e-3, 1.0)
        group = TrainerGroup(config, listener, ExternalRanks(Path("logs")), TOKEN, cost, init="random")
        serving = threading.Thread(target=serve, args=(listener.address, statuses))
        serving.start()
        try:
            group.begin()
            await group.start(None)
            yield group
        finally:
            await group.close()
            serving.join()
        assert statuses == [0]

    return start


def assert_near(one, two, atol=1e-5):
    assert len(one) == len(two)
    for a, b in zip(one, two, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=atol)


def equal(one, two):
    return all(np.array_equal(a, b) for a, b in zip(one, two, strict=True))


async def test_the_verbs_are_those_of_the_policy_in_the_order_of_the_data(tmp_path, started):
    config = configured(tmp_path)
    spec = LossSpec.of(config.algorithm, per_sequence=True)
    async with started(config) as group:
        assert (group.info.vocab_size, group.info.replicas, group.info.max_tokens) == (511, 1, 128)
        assert group.info.device == "cpu" and not group.info.hosts_apart and not list((tmp_path / "out").iterdir())
        (micro_batches,) = group.plan(DATA)
        assert len(micro_batches) > 2
        first, hotter = await group.forward(DATA), await group.forward(DATA, temperature=3.0)
        await group.keep_reference()
        report = await group.forward_backward(DATA, spec)
        step = await group.optim_step(ADAM)
        later, reference = await group.forward(DATA), await group.forward(DATA, "reference")

    policy = MegatronPolicy(config, "random")
    try:
        whole = [[datum] for datum in DATA]
        assert_near(first, [row for (row,) in policy.forward(whole)])
        assert_near(hotter, [row for (row,) in policy.forward(whole, temperature=3.0)])
        alone = policy.forward_backward(whole, make_loss(config.algorithm))
        assert report.loss == pytest.approx(alone.loss, rel=1e-4, abs=1e-6)
        assert report.tokens == alone.tokens == sum(map(len, DATA))
        expected = policy.optim_step(ADAM)
        assert step.grad_norm == pytest.approx(expected.grad_norm, rel=1e-4)
        assert (step.lr, step.skipped, step.held) == (1e-2, False, False)
        assert_near(later, [row for (row,) in policy.forward(whole)], atol=1e-4)
    finally:
        policy.close()
    assert equal(reference, first) and not np.allclose(np.concatenate(later), np.concatenate(first), atol=1e-3)
    assert not equal(first, hotter)
    assert len(report.sequence_losses) == len(DATA)
    assert sum(report.sequence_losses) == pytest.approx(report.loss, rel=1e-4, abs=1e-6)
    # On policy each sequence adds −Σ of its scaled advantages, whatever its micro-batch.
    on_policy = [replace(d, behaviour_logprobs=row.astype(np.float32)) for d, row in zip(DATA, first, strict=True)]
    async with started(config) as group:
        report = await group.forward_backward(on_policy, spec)
        assert report.sequence_losses == pytest.approx([-d.scaled_advantages.sum() for d in DATA], rel=1e-3, abs=1e-5)


async def test_states_come_back_and_a_copy_is_of_the_moment_it_was_taken(tmp_path, started):
    config = configured(tmp_path)
    spec = LossSpec.of(config.algorithm)
    async with started(config) as group:
        await group.forward_backward(DATA, spec)
        await group.optim_step(ADAM)
        saved, files = await group.forward(DATA), await group.save_state(tmp_path / "saved")
        written = await group.copy_state(tmp_path / "copied")
        await group.forward_backward(DATA, spec)
        norm = (await group.optim_step(ADAM)).grad_norm
        trained = await group.forward(DATA)
        assert not equal(saved, trained)
        copied = await written
        assert copied == files and list(files) == sorted(files) and {"__0_0.distcp", ".metadata"} <= set(files)
        for folder in ("saved", "copied"):
            assert {file.name for file in (tmp_path / folder).iterdir()} == set(files)
            for name, entry in files.items():
                content = (tmp_path / folder / name).read_bytes()
                assert entry == {"bytes": len(content), "sha256": sha256(content).hexdigest()}
        for folder in ("saved", "copied"):
            await group.forward_backward(DATA, spec)  # a load forgets these gradients
            await group.load_state(tmp_path / folder)
            assert equal(await group.forward(DATA), saved)
            await group.forward_backward(DATA, spec)
            assert (await group.optim_step(ADAM)).grad_norm == norm
            assert equal(await group.forward(DATA), trained)


async def test_what_is_not_finite_is_found_held_back_and_discarded(tmp_path, started):
    config = configured(tmp_path)
    spec = LossSpec.of(config.algorithm)
    spoilt = list(DATA)
    spoilt[4] = replace(DATA[4], scaled_advantages=np.full(len(DATA[4]), np.nan, np.float32))
    async with started(config) as group:
        before = await group.forward(DATA)
        assert math.isnan((await group.forward_backward(spoilt, spec)).loss)
        found = await group.examine()
        assert found.weights == [] and len(found.gradients) == found.parameters == 2 * 8 + 3
        (blamed,) = [one.sequences for one in found.micro_batches if not math.isfinite(one.loss)]
        assert 4 in blamed and sorted(i for one in found.micro_batches for i in one.sequences) == list(range(7))
        assert (await group.optim_step(ADAM)).skipped and equal(await group.forward(DATA), before)

        await group.forward_backward(DATA, spec)
        held = await group.optim_step(ADAM, hold_above=1e-6)
        assert held.held and not held.skipped and held.grad_norm > 1e-6 and equal(await group.forward(DATA), before)
        taken = await group.optim_step(ADAM)
        assert taken.grad_norm == held.grad_norm and not taken.held and not equal(await group.forward(DATA), before)

        await group.forward_backward(DATA, spec)
        await group.discard_gradients()
        assert (await group.optim_step(replace(ADAM, weight_decay=0.0))).grad_norm == 0


async def test_engines_are_sent_the_weights_of_the_last_step_and_an_export_holds_them(tmp_path, started):
    config = configured(tmp_path)
    first = MegatronPolicy(config, "random")
    try:
        first.export_hf(tmp_path / "first")
    finally:
        first.close()
    weights = load_file(tmp_path / "first" / "model.safetensors")
    config = configured(tmp_path, model={"path": str(tmp_path / "first")})
    spec = LossSpec.of(config.algorithm)

    async def deliver(message):
        raise AssertionError("there is nothing to tell before the folder is whole")

    async with started(config) as group:
        assert await group.prepare_weights("disk", {}) == {}
        await group.forward_backward(DATA, spec)
        await group.optim_step(ADAM)
        await group.send_weights(3, {"path": str(tmp_path / "v3")}, deliver)
        await group.export_hf(tmp_path / "hf")
    sent = {}
    for file in sorted((tmp_path / "v3").glob("*.safetensors")):
        sent |= load_file(file)
    exported = load_file(tmp_path / "hf" / "model.safetensors")
    assert sent.keys() == exported.keys() and len(sent) > 20
    assert all(value.equal(exported[name]) for name, value in sent.items())
    assert weights.keys() == sent.keys() and not any(value.equal(sent[name]) for name, value in weights.items())


async def test_a_colocated_trainer_leaves_its_devices_between_steps(tmp_path, started):
    config = configured(tmp_path)
    tree = config.model_dump()
    tree["rollout"]["engine"]["colocated"] = True
    spec = LossSpec.of(config.algorithm)
    async with started(Config.model_validate(tree)) as group:
        (sizes,) = group.info.part_bytes
        # float32: the parameters are their own masters; there are a few buffers beside them.
        assert sizes["parameters"] == pytest.approx(sizes["gradients"], rel=0.01) and sizes["gradients"] > 0
        assert sizes["optimizer"] == pytest.approx(2 * sizes["gradients"], rel=0.01)
        await group.forward_backward(DATA, spec)
        await group.optim_step(ADAM)
        before = await group.forward(DATA)
        await group.offload(("gradients", "optimizer"))
        (held,) = await group.memory("begin")
        assert (held["gradients"], held["optimizer"], held["parameters"]) == (0, 0, sizes["parameters"])
        assert held["process"] > sizes["parameters"] and equal(await group.forward(DATA), before)
        await group.offload()
        (held,) = await group.memory("begin")
        assert not any(held[part] for part in sizes)
        await group.onload()
        assert equal(await group.forward(DATA), before)
        assert (await group.memory("begin"))[0].items() >= sizes.items()

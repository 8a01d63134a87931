"""The guarded optimizer step with real ranks: a skipped step changes nothing, and dumps replay in any layout."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("megatron_fleet.trainer.megatron")

import numpy as np
import pytest_asyncio
from guards import make_guard
from policy_fixtures import make_batch, make_config, write_config
from safetensors.torch import load_file, save_file
from tiny_configs import raw_config
from tiny_models import make
from turns import in_turn

from megatron_fleet import cli
from megatron_fleet.config.schema import Config, ParallelConfig
from megatron_fleet.debug.dumps import Dump, open_dump
from megatron_fleet.debug.replay import Found, replay
from megatron_fleet.loop.guard import FEWEST
from megatron_fleet.trainer.base import AdamParams, LossSpec, OptimReport, Trainer
from megatron_fleet.trainer.group import open_trainer

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

ALL = 35
"""Parameters of the tiny model."""
LAYOUTS = {"single": {}, "dp2": {"data": 2}, "pp2": {"pipeline": 2}, "tp2": {"tensor": 2}}


class Run:
    """A trainer of real ranks, with updates and guards of several runs one after the other."""

    def __init__(self, config: Config, trainer: Trainer, scratch: Path) -> None:
        self.config, self.trainer, self._scratch = config, trainer, scratch
        self._saves = 0

    def begin(self, out: Path, algorithm: dict[str, Any] | None = None, safety: dict[str, Any] | None = None) -> None:
        """A new guard; the trainer stays as it is."""
        tree = self.config.model_dump()
        tree["run"]["out"] = str(out)
        tree["algorithm"] |= algorithm or {}
        tree["policy"]["safety"] |= safety or {}
        self.config = Config.model_validate(tree)
        self.guard = make_guard(self.config, self.trainer)
        self.dumps, self.taken = out / "dumps", 0

    async def step(self, data, lr: float = 1e-3) -> OptimReport:
        self.taken += 1
        return (await self.guard.update(self.taken, 0, lr, data, LossSpec.of(self.config.algorithm)))[1]

    def accustom(self, norm: float) -> None:
        """As if the norms before had all been ``norm``."""
        self.guard.load({"norms": [norm] * FEWEST, "skipped": 0, "skipped_in_a_row": 0})

    def dump(self, step: int) -> Dump:
        return open_dump(self.dumps / f"step-{step:06d}.0")

    async def state(self) -> dict[str, str]:
        """Checksums of all weights and optimizer states."""
        self._saves += 1
        folder = self._scratch / f"state{self._saves}"
        folder.mkdir()
        return shards(await self.trainer.save_state(folder))

    async def replay(self, dump: Dump, same_layout: bool = True) -> Found:
        """Replay in these very ranks."""

        @asynccontextmanager
        async def here(_: Config) -> AsyncIterator[Trainer]:
            yield self.trainer
            await self.trainer.discard_gradients()

        return await replay(dump, self.config, same_layout, here)


def shards(files) -> dict[str, str]:
    return {name: entry["sha256"] for name, entry in files.items() if name.endswith(".distcp")}


def dumped_state(dump: Dump) -> dict[str, str]:
    files = json.loads((dump.path / "manifest.json").read_text())["files"]
    return shards({name.removeprefix("state/"): entry for name, entry in files.items() if name.startswith("state/")})


def build_config(model: Path, out: Path, layout: str = "single", policy: dict[str, Any] | None = None) -> Config:
    tree = make_config(model, ParallelConfig(**LAYOUTS[layout]), micro_batch_tokens=128).model_dump()
    tree["run"]["out"] = str(out)
    tree["policy"] |= policy or {}
    return Config.model_validate(tree)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def start(tmp_path_factory) -> AsyncIterator[Callable[..., Any]]:
    """Opens the trainer of a layout, once."""
    folder, runs = tmp_path_factory.mktemp("ranks"), {}
    model = write_config(folder / "model")
    async with AsyncExitStack() as stack:

        async def get(layout: str) -> Run:
            if layout not in runs:
                config = build_config(model, folder / layout, layout)
                trainer = await stack.enter_async_context(open_trainer(config, init="random"))
                runs[layout] = Run(config, trainer, folder / layout)
            return runs[layout]

        yield get


@pytest_asyncio.fixture(loop_scope="module")
async def run(start, tmp_path) -> Run:
    run = await start("single")
    run.begin(tmp_path / "out", algorithm={"kl": {"coef": 0.0}, "correction": {"kind": "off"}})
    return run


@asynccontextmanager
async def alone(config: Config, folder: Path, init: str) -> AsyncIterator[Run]:
    """A trainer for one test."""
    async with open_trainer(config, init=init) as trainer:
        run = Run(config, trainer, folder)
        run.begin(folder / "out")
        yield run


async def command(capsys, *arguments: object) -> tuple[int, str]:
    """``mfleet debug replay``, with ranks of its own."""
    status = await asyncio.to_thread(cli.main, ["debug", "replay", *map(str, arguments)])
    printed = capsys.readouterr()
    assert status != 2, printed.err
    return status, printed.out


def healthy(scale: float = 1.0, vocab_size: int = 511):
    """Three micro-batches at least."""
    batch = make_batch(count=10, longest=60, vocab_size=vocab_size)
    for datum in batch:
        datum.scaled_advantages *= np.float32(scale)
    return batch


BAD = 9


def spoil(data, name: str):
    """``data`` with one value of the last sequence's field or array ``name`` not finite."""
    if name == "proximal":
        for datum in data:
            datum.arrays[name] = datum.behaviour_logprobs.copy()
    values = data[BAD].arrays[name] if name == "proximal" else getattr(data[BAD], name)
    values[np.flatnonzero(data[BAD].loss_mask)[3]] = np.nan
    return data


FAULTS = {
    # Field, algorithm, how many gradients are not finite. The last fault ends in a clamp, behind which the gradient
    # is 0: the loss alone shows it.
    "scaled_advantages": ({}, ALL),
    "proximal": ({}, 0),
}


@pytest.mark.parametrize("field", FAULTS)
async def test_a_step_that_is_not_finite_is_skipped_kept_and_replayed(run, tmp_path, caplog, field):
    algorithm, gradients = FAULTS[field]
    run.begin(tmp_path / "out", algorithm)
    await run.step(healthy())
    before = await run.state()
    with caplog.at_level(logging.WARNING):
        report = await run.step(spoil(healthy(), field))
    assert report.skipped and report.skipped_total == 1
    assert await run.state() == before
    assert dumped_state(run.dump(2)) == before
    assert "step 2: loss nan, gradient norm" in caplog.text
    record = run.dump(2).record
    assert sorted(i for m in record.micro_batches for i in m.sequences) == list(range(10))
    assert [BAD in m.sequences for m in record.micro_batches if not np.isfinite(m.loss)] == [True]
    assert len(record.gradients) == gradients and record.parameters == ALL

    found = await run.replay(run.dump(2))
    assert found.differences() == []
    assert found.tolerance == 1e-6
    blamed = {s.index: s.fields for m in found.micro_batches for s in m.sequences if not np.isfinite(s.loss)}
    assert blamed == {BAD: [field]}
    assert not (await run.step(healthy())).skipped


async def test_an_unknown_behaviour_is_left_out_by_a_correction(run, tmp_path):
    """It is within no bounds, so the step is taken without it."""
    run.begin(tmp_path / "out", {"correction": {"kind": "token_tis"}})
    await run.step(healthy())
    before = await run.state()
    report = await run.step(spoil(healthy(), "behaviour_logprobs"))
    assert not report.skipped and np.isfinite(report.grad_norm) and await run.state() != before


@pytest.mark.in_turn(number=1, of=2)
async def test_a_bad_weight_is_named(tmp_path, caplog):
    model = make("qwen3", tmp_path / "model")
    name = "model.layers.1.mlp.down_proj.weight"
    (file,) = (file for file in model.glob("*.safetensors") if name in load_file(file))
    tensors = load_file(file)
    tensors[name][0, 7] = float("nan")
    save_file(tensors, file, metadata={"format": "pt"})
    async with alone(build_config(model, tmp_path / "out"), tmp_path, "hf") as run:
        with caplog.at_level(logging.WARNING):
            data = healthy(vocab_size=raw_config("qwen3", "v5")["vocab_size"])
            assert (await run.step(data)).skipped
        record = run.dump(1).record
        assert record.weights == ["decoder.layers.1.mlp.linear_fc2.weight"]
        assert not any(np.isfinite(m.loss) for m in record.micro_batches)
        assert "weights are not finite: decoder.layers.1.mlp.linear_fc2.weight" in caplog.text
        assert (await run.replay(run.dump(1))).differences() == []


async def test_a_spike_is_taken_and_kept_as_it_was_before(run):
    usual = await run.step(healthy())
    run.accustom(usual.grad_norm)
    assert not (await run.step(healthy())).spike
    before = await run.state()
    report = await run.step(healthy(scale=100))
    assert report.spike and not report.skipped
    assert await run.state() != before
    dump = run.dump(3)
    assert dumped_state(dump) == before
    found = await run.replay(dump)
    assert (found.differences(), found.verdict) == ([], "spike")
    assert found.grad_norm[0] == report.grad_norm > 10 * usual.grad_norm
    assert found.gradients == ([], [])


async def test_looking_on_changes_nothing(run, tmp_path):
    """A guarded step is the step, and so is one that was held as a spike."""
    (tmp_path / "before").mkdir()
    await run.trainer.save_state(tmp_path / "before")
    reports = [await run.step(healthy())]
    run.accustom(reports[0].grad_norm / 1000)
    reports.append(await run.step(healthy()))
    guarded = await run.state()
    assert [r.spike for r in reports] == [False, True]
    await run.trainer.load_state(tmp_path / "before")
    adam = AdamParams.of(run.config.policy.optimizer, 1e-3)
    for report in reports:
        await run.trainer.forward_backward(healthy(), LossSpec.of(run.config.algorithm))
        assert await run.trainer.optim_step(adam) == replace(report, spike=False)
    assert await run.state() == guarded


@pytest.mark.in_turn(number=1, of=2)
async def test_a_skipped_step_leaves_the_biases_of_routers(tmp_path):
    """Megatron moves them before the norm is known: a skipped step takes that back, a dump has them as they were."""
    hf = raw_config("deepseek_v3", "v5")
    config = build_config(
        write_config(tmp_path / "model", **hf), tmp_path / "out", policy={"router": {"bias_update_rate": 0.5}}
    )
    async with alone(config, tmp_path, "random") as run:
        data = healthy(vocab_size=hf["vocab_size"])
        before = await run.state()
        assert (await run.step(spoil(healthy(vocab_size=hf["vocab_size"]), "scaled_advantages"))).skipped
        assert await run.state() == before
        logprobs = await run.trainer.forward(data)
        run.accustom(1e-6)
        # With a learning rate of 0 nothing moves but the biases.
        taken = await run.step(data, lr=0.0)
        assert taken.spike and dumped_state(run.dump(2)) == before
        moved = await run.trainer.forward(data)
        assert any(not np.array_equal(one, two) for one, two in zip(logprobs, moved, strict=True))
        found = await run.replay(run.dump(2))
        assert found.differences() == []
        assert found.grad_norm == (taken.grad_norm, taken.grad_norm)


@pytest.mark.in_turn(number=0, of=2)
async def test_adapters_replay_beside_the_model_they_belong_to(tmp_path, capsys):
    model = make("qwen3", tmp_path / "model")
    config = build_config(model, tmp_path / "out", policy={"lora": {"rank": 4}})
    data = healthy(vocab_size=raw_config("qwen3", "v5")["vocab_size"])
    async with alone(config, tmp_path, "hf") as run:
        for _ in range(2):  # the product of the adapters is 0 before the first step
            await run.step(data)
        run.accustom(1e-3)
        report = await run.step(data)
        assert report.spike
    status, printed = await command(capsys, run.dump(3).path, "--json")
    assert (status, json.loads(printed)["grad_norm"]) == (0, [report.grad_norm] * 2)


async def test_a_replay_under_other_settings_says_what_differs(run, tmp_path, capsys):
    run.begin(tmp_path / "out", {"kl": {"coef": 0.1}})
    run.accustom(1e-3)
    data = healthy()
    for datum in data:
        datum.arrays["reference"] = datum.behaviour_logprobs
    assert (await run.step(data)).spike
    count = len(run.dump(1).record.micro_batches)
    status, printed = await command(capsys, run.dump(1).path, "--json", "algorithm.kl.coef=0.2")
    differences = ["the gradient norm", "the loss", f"the losses of {count} of {count} micro-batches"]
    assert (status, json.loads(printed)["differences"]) == (1, differences)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def trained(start, tmp_path_factory) -> Callable[..., Any]:
    """Four steps in a layout: a good one, one that is not finite in one replica alone, a good one, a spike."""
    done: dict[str, tuple[Run, list[OptimReport], bool]] = {}

    async def get(layout: str) -> tuple[Run, list[OptimReport], bool]:
        if layout not in done:
            run: Run = await start(layout)
            run.begin(tmp_path_factory.mktemp(layout))
            reports = [await run.step(healthy())]
            before = await run.state()
            reports.append(await run.step(spoil(healthy(), "scaled_advantages")))
            unchanged = await run.state() == before
            reports.append(await run.step(healthy()))
            run.accustom(1e-3)
            reports.append(await run.step(healthy()))
            done[layout] = run, reports, unchanged
        return done[layout]

    return get


@pytest.mark.parametrize("layout", in_turn(["dp2", "pp2"], ["dp2"], of=2))
async def test_every_rank_skips_what_one_of_them_cannot_do(trained, layout):
    run, reports, unchanged = await trained(layout)
    assert unchanged
    assert [r.skipped for r in reports] == [False, True, False, False]
    assert [r.spike for r in reports] == [False, False, False, True]
    record = run.dump(2).record
    assert sorted(i for m in record.micro_batches for i in m.sequences) == list(range(10))
    assert [BAD in m.sequences for m in record.micro_batches if not np.isfinite(m.loss)] == [True]
    assert len(record.gradients) == record.parameters == ALL


PAIRS = [("dp2", "dp2"), ("dp2", "tp2"), ("pp2", "pp2"), ("pp2", "dp2")]


@pytest.mark.parametrize(("layout", "target"), in_turn(PAIRS, PAIRS[:2], of=2))
async def test_both_dumps_replay_in_any_layout(start, trained, layout, target):
    run, _, _ = await trained(layout)
    for step in (2, 4):
        found = await (await start(target)).replay(run.dump(step), same_layout=layout == target)
        assert found.differences() == []
        assert found.tolerance == (1e-6 if layout == target else 1e-4)
        blamed = {s.index: s.fields for m in found.micro_batches for s in m.sequences if s.fields}
        assert blamed == ({BAD: ["scaled_advantages"]} if step == 2 else {})


@pytest.mark.in_turn(number=0, of=2)
async def test_the_command_replays_alone_and_in_a_layout(trained, capsys):
    run, _, _ = await trained("dp2")
    status, printed = await command(capsys, run.dump(2).path)
    assert status == 0
    assert f"sequence {BAD}: scaled_advantages not finite" in printed
    assert f"gradients that are not finite: {ALL} of {ALL}" in printed
    assert "reproduced in another layout than the run's (tolerance 0.0001)" in printed
    status, printed = await command(capsys, run.dump(4).path, "parallel.data=2")
    assert status == 0
    assert "reproduced in the layout of the run (tolerance 1e-06)" in printed

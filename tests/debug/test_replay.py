"""`mfleet debug replay` with a trainer in memory: what is run, what is compared, what is said."""

from __future__ import annotations

import json
import tempfile
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from fake_trainer import FakeTrainer
from policy_fixtures import make_batch, make_config, write_config

from megatron_fleet import cli
from megatron_fleet.config.schema import ParallelConfig
from megatron_fleet.debug import replay as module
from megatron_fleet.debug.dumps import Dumps, Record, Verdict, open_dump
from megatron_fleet.debug.replay import to_json, to_text
from megatron_fleet.storage.local import fingerprint
from megatron_fleet.trainer.base import LossSpec, TrainerLost

VOCABULARY = 511


class Replays:
    """Dumps steps of a trainer and replays them in other ones."""

    def __init__(self, folder):
        self.folder = folder
        self.config = make_config(write_config(folder / "model"), ParallelConfig(data=2))
        self.asked = []
        self.trainer = FakeTrainer(VOCABULARY, sequences_per_micro_batch=2)
        self.trainer.weights = np.random.default_rng(0).normal(size=VOCABULARY)

    async def dump(self, data, step=1, micro_batches=True):
        """A dump of an update with ``data`` that was skipped or spiked, whatever is wrong with it."""
        report = await self.trainer.forward_backward(data, LossSpec.of(self.config.algorithm))
        norm = float(np.linalg.norm(self.trainer.gradient))
        seen = await self.trainer.examine()
        verdict = Verdict.SPIKE if np.isfinite(norm) else Verdict.NOT_FINITE
        record = Record(
            step, 0, verdict, "cpu", 1e-3, report.loss, norm, 1.0, seen.micro_batches if micro_batches else [],
            seen.weights, seen.gradients, seen.parameters,
        )  # fmt: skip
        await self.trainer.discard_gradients()
        path = await Dumps(self.folder / "dumps", 9, self.config).save(self.trainer.save_state, data, record)
        return open_dump(path)

    @asynccontextmanager
    async def open(self, config):
        self.asked.append(config)
        other = FakeTrainer(VOCABULARY, sequences_per_micro_batch=3)
        yield other
        assert other.calls == ["load_state", "forward_backward", "optim_step", "examine"]

    async def run(self, dump, same_layout=True):
        return await module.replay(dump, self.config, same_layout, self.open)


@pytest.fixture
def replays(tmp_path):
    return Replays(tmp_path)


async def test_a_step_comes_out_the_same_in_other_micro_batches(replays):
    found = await replays.run(await replays.dump(make_batch(count=7)))
    assert found.differences() == []
    assert [[s.index for s in m.sequences] for m in found.micro_batches] == [[0, 1], [2, 3], [4, 5], [6]]
    assert found.tolerance == module.SAME_ORDER
    assert found.grad_norm[0] == found.grad_norm[1] > 0
    assert "reproduced in the layout of the run (tolerance 1e-06)" in to_text(found)
    other = await replays.run(await replays.dump(make_batch(count=7)), same_layout=False)
    assert other.tolerance == module.OTHER_ORDER["float32"]


async def test_the_sequence_that_is_to_blame_is_named(replays):
    data = make_batch(count=6)
    data[4].scaled_advantages[-1] = np.nan
    found = await replays.run(await replays.dump(data))
    assert found.differences() == []
    assert found.verdict == "not_finite"
    blamed = {s.index: s.fields for m in found.micro_batches for s in m.sequences if s.fields}
    assert blamed == {4: ["scaled_advantages"]}
    text = to_text(found)
    assert "sequence 4: scaled_advantages not finite" in text
    assert "gradients that are not finite: 1 of 1, from the output on: logits" in text
    printed = json.loads(to_json(found))
    assert printed["reproduced"] is True
    assert printed["micro_batches"][2]["loss"] == "nan"
    assert printed["micro_batches"][2]["sequences"][0]["fields"] == ["scaled_advantages"]


async def test_what_differs_is_said(replays):
    dump = await replays.dump(make_batch(count=6))
    record = dump.record
    wrong = [replace(record.micro_batches[0], loss=9.0), *record.micro_batches[1:]]
    record = replace(record, grad_norm=2 * record.grad_norm, loss=9.0, micro_batches=wrong, weights=["logits"])
    found = await replays.run(replace(dump, record=record))
    assert found.differences() == [
        "the gradient norm",
        "the loss",
        "the losses of 1 of 3 micro-batches",
        "which weights are not finite",
    ]
    assert "differs" in to_text(found)


async def test_losses_that_cancel_are_compared_at_the_scale_of_their_parts(replays):
    """Only rounding is left of a micro-batch whose losses add up to almost nothing; it must not count."""
    data = make_batch(count=2, seed=1)
    data[1] = replace(data[0], scaled_advantages=-data[0].scaled_advantages)
    dump = await replays.dump(data)
    assert abs(dump.record.loss) < 1e-9
    rounded = replace(dump.record.micro_batches[0], loss=1e-8)
    found = await replays.run(replace(dump, record=replace(dump.record, loss=1e-8, micro_batches=[rounded])))
    assert "the loss" not in found.differences()
    assert not [text for text in found.differences() if "micro-batches" in text]


async def test_a_trainer_without_micro_batches_is_compared_as_a_whole(replays):
    found = await replays.run(await replays.dump(make_batch(count=5), micro_batches=False))
    assert found.differences() == []
    (whole,) = found.micro_batches
    assert [s.index for s in whole.sequences] == [0, 1, 2, 3, 4]


async def test_a_long_table_shows_what_is_wrong(replays):
    data = make_batch(count=80)
    data[71].scaled_advantages[-1] = np.inf
    text = to_text(await replays.run(await replays.dump(data)))
    assert "39 more micro-batches, in --json" in text
    assert "sequence 71: scaled_advantages not finite" in text


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """Where outputs of replays go."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture
def command(replays, temporary, monkeypatch, capsys):
    """Exit status and output of the command, with trainers in memory. It leaves no files."""
    monkeypatch.setattr(module, "_open_ranks", replays.open)

    def run(*arguments):
        status = cli.main(["debug", "replay", *map(str, arguments)])
        assert list(temporary.iterdir()) == []
        return status, capsys.readouterr()

    return run


@pytest.fixture
async def dump(replays):
    return await replays.dump(make_batch(count=4))


def test_alone_in_one_process_unless_a_layout_is_asked_for(replays, dump, command):
    assert command(dump.path)[0] == 0
    assert command(dump.path, "parallel.tensor=2", "policy.micro_batch_tokens=512", "--json")[0] == 0
    alone, wanted = replays.asked
    assert (alone.parallel, wanted.parallel) == (ParallelConfig(), ParallelConfig(data=2, tensor=2))
    assert wanted.policy.micro_batch_tokens == 512
    assert alone.model.path == str(dump.model)
    assert alone.run.out != replays.config.run.out, "logs of ranks must not be written among those of the run"


def test_bad_overrides_and_a_difference_have_their_status(replays, dump, command):
    status, printed = command(dump.path, "parallel.tensr=2")
    assert (status, replays.asked) == (2, [])
    assert "there is no key parallel.tensr; did you mean parallel.tensor?" in printed.err
    (dump.path / "record.json").write_text(json.dumps(dump.record.to_json() | {"grad_norm": 7.0}))
    manifest = dump.path / "manifest.json"
    content = json.loads(manifest.read_text())
    content["files"]["record.json"] = fingerprint(dump.path / "record.json")
    manifest.write_text(json.dumps(content))
    status, printed = command(dump.path)
    assert status == 1
    assert "not reproduced in another layout than the run's (tolerance 0.0001): the gradient norm" in printed.out


def test_a_rank_that_dies_is_one_sentence_and_leaves_its_log(dump, temporary, monkeypatch, capsys):
    @asynccontextmanager
    async def dead(config):
        (Path(config.run.out) / "rank_0.log").touch()
        raise TrainerLost(f"rank 0 was killed by SIGKILL; its log is {config.run.out}/rank_0.log")
        yield

    monkeypatch.setattr(module, "_open_ranks", dead)
    assert cli.main(["debug", "replay", str(dump.path)]) == 2
    (log,) = temporary.glob("*/rank_0.log")
    assert f"the replay failed, rank 0 was killed by SIGKILL; its log is {log}." in capsys.readouterr().err

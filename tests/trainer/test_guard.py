"""The guarded optimizer step with a real policy: what is skipped, told and kept, and that a dump replays."""

from __future__ import annotations

import copy
import json
import logging

import pytest

pytest.importorskip("megatron_fleet.trainer.megatron")

import numpy as np
import torch
from policy_fixtures import make_batch, make_config, write_config
from tiny_configs import raw_config
from tiny_models import make

from megatron_fleet import cli
from megatron_fleet.algorithms.losses import make_loss
from megatron_fleet.config.errors import UserError
from megatron_fleet.config.schema import Config
from megatron_fleet.debug.dumps import open_dump
from megatron_fleet.loop.guard import StepGuard, Update
from megatron_fleet.loop.safety import FEWEST, Verdict
from megatron_fleet.platform.communicator import TorchCommunicator
from megatron_fleet.trainer.megatron.policy import MegatronPolicy
from megatron_fleet.trainer.row_losses import RowLosses

ALL = 35
"""Parameters of the tiny model."""


class Trainer:
    """A policy with its guard, and one optimizer step of it."""

    def __init__(self, folder, safety=None, algorithm=None, lora=None, **hf):
        """``lora``: rank of adapters beside the stored weights of a tiny Qwen3; a random model without."""
        model = make("qwen3", folder / "model") if lora else write_config(folder / "model", **hf)
        tree = make_config(model).model_dump()
        tree["policy"]["lora"]["rank"] = lora or 0
        tree["run"]["out"] = str(folder / "out")
        tree["policy"]["safety"] = safety or {}
        tree["algorithm"] |= algorithm or {}
        self.config = Config.model_validate(tree)
        self.policy = MegatronPolicy(self.config, init="hf" if lora else "random")
        self.guard = StepGuard(self.config, self.policy, TorchCommunicator())
        self.taken = 0

    def step(self, rows):
        self.taken += 1
        losses = RowLosses(make_loss(self.config.algorithm))
        report = self.policy.forward_backward(rows, losses)
        return self.guard.optim_step(Update(self.taken, 0, 1e-3, rows, losses, report))

    def dumps(self):
        return sorted(path.name for path in self.policy_out.glob("*"))

    @property
    def policy_out(self):
        return self.guard._dumps._folder

    def state(self):
        """Parameters, and the optimizer's masters and moments."""
        optimizer = self.policy._optimizer
        values = [p for chunk in self.policy.model_chunks for p in chunk.parameters()]
        for part in optimizer.chained_optimizers:
            for group in part.optimizer.param_groups:
                for p in group["params"]:
                    values += [p, *(v for v in part.optimizer.state[p].values() if torch.is_tensor(v))]
        return [v.detach().clone() for v in values]


@pytest.fixture
def start(tmp_path):
    """Builds trainers one after the other, in the folder given: the process groups are per process."""
    alive = []

    def make(name="run", **settings):
        while alive:
            alive.pop().policy.close()
        alive.append(Trainer(tmp_path / name, **settings))
        return alive[-1]

    yield make
    while alive:
        alive.pop().policy.close()


def healthy(scale=1.0):
    """Three rows of two sequences."""
    batch = make_batch(count=6, longest=60)
    for datum in batch:
        datum.weights *= np.float32(scale)
    return [batch[:2], batch[2:4], batch[4:]]


def replay(trainer, capsys, *arguments):
    """Exit status and JSON of ``mfleet debug replay`` on the newest dump; ends every trainer."""
    if torch.distributed.is_initialized():
        trainer.policy.close()
    capsys.readouterr()
    status = cli.main(["debug", "replay", "--json", str(trainer.policy_out / trainer.dumps()[-1]), *arguments])
    printed = capsys.readouterr()
    assert status != 2, printed.err
    return status, json.loads(printed.out)


def bad_field(name):
    def spoil(_, rows):
        trained = np.flatnonzero(rows[1][1].mask)
        if getattr(rows[1][1], name) is None:
            for datum in (d for row in rows for d in row):
                setattr(datum, name, datum.behaviour_logprobs.copy())
        getattr(rows[1][1], name)[trained[3]] = np.nan

    return spoil


def bad_weight(trainer, _):
    layer = trainer.policy.model_chunks[0].decoder.layers[2].mlp.linear_fc1
    with torch.no_grad():
        layer.weight[3, 5] = float("nan")


CORRECTED = {"correction": {"kind": "token_tis"}}
"""Reads the behaviour log-probs."""
FAULTS = {
    # What is wrong, the algorithm, the fields to be named, how many gradients are not finite. The last fault ends in a
    # clamp, behind which the gradient is 0: the loss alone tells.
    "weights": (bad_field("weights"), {}, ["weights"], ALL),
    "a parameter": (bad_weight, {}, [], ALL),
    "behaviour log-probs": (bad_field("behaviour_logprobs"), CORRECTED, ["behaviour_logprobs"], ALL),
    "proximal log-probs": (bad_field("proximal_logprobs"), {}, ["proximal_logprobs"], 0),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_step_that_is_not_finite_is_skipped_kept_and_replayed(start, capsys, caplog, fault):
    spoil, algorithm, fields, gradients = FAULTS[fault]
    trainer, rows = start(algorithm=algorithm), healthy()
    trainer.step(healthy())
    spoil(trainer, rows)
    before = trainer.state()
    with caplog.at_level(logging.WARNING):
        report = trainer.step(rows)
    assert report.skipped and not report.spike and report.skipped_total == 1
    for one, two in zip(before, trainer.state(), strict=True):
        assert torch.equal(one.nan_to_num(7.0), two.nan_to_num(7.0))
    assert trainer.dumps() == ["step-000002.0"]
    assert "step 2: loss nan, gradient norm" in caplog.text
    assert f"mfleet debug replay {trainer.policy_out}/step-000002.0" in caplog.text

    status, found = replay(trainer, capsys)
    assert (status, found["reproduced"], found["same_layout"]) == (0, True, True)
    assert found["grad_norm"] == (["nan"] * 2 if gradients else [report.grad_norm] * 2)
    assert [len(names) for names in found["gradients"]] == [gradients, gradients]
    bad_rows = [row["row"] for row in found["rows"] if row["loss"] == "nan"]
    if fault == "a parameter":
        assert bad_rows == [0, 1, 2]
        assert found["weights"] == [["decoder.layers.2.mlp.linear_fc1.weight"]] * 2
        assert "weights are not finite: decoder.layers.2.mlp.linear_fc1.weight" in caplog.text
    else:
        assert bad_rows == [1]
        assert "not finite in rows (data rank.row) 0.1" in caplog.text
        one, two = found["rows"][1]["sequences"]
        assert (one["fields"], two["fields"], two["loss"]) == ([], fields, "nan")
        assert isinstance(one["loss"], float)
    for row in found["rows"]:
        if row["loss"] != "nan":
            assert row["loss"] == row["recorded"]
            assert sum(s["loss"] for s in row["sequences"]) == pytest.approx(row["loss"], abs=1e-5)
    if fault == "weights":
        assert_table(trainer, capsys)


def assert_table(trainer, capsys):
    """Without ``--json`` the same is told in words."""
    dump = str(trainer.policy_out / "step-000002.0")
    assert cli.main(["debug", "replay", dump]) == 0
    printed = capsys.readouterr().out
    assert "0.1" in printed and "sequence 1: weights not finite" in printed
    assert f"gradients that are not finite: {ALL} of {ALL}" in printed
    assert "reproduced in the layout of the run" in printed
    assert cli.main(["debug", "replay", dump, "parallel.tensr=2"]) == 2
    assert "there is no key parallel.tensr; did you mean parallel.tensor?" in capsys.readouterr().err


def test_gradients_are_named_from_where_they_broke(start, capsys):
    """The loss is finite; from the third layer down to the input the backward pass is not."""
    trainer = start()

    def spoil(module, inputs, output):
        output[0].register_hook(lambda gradient: gradient * float("nan"))

    trainer.policy.model_chunks[0].decoder.layers[1].register_forward_hook(spoil)
    assert trainer.step(healthy()).skipped
    record = open_dump(trainer.policy_out / "step-000001.0").record
    assert record.weights == [] and np.isfinite(record.row_losses).all()
    assert record.gradients[0].startswith("decoder.layers.1.mlp.linear_fc2")
    assert record.gradients[-1] == "embedding.word_embeddings.weight"
    assert not [name for name in record.gradients if name.startswith(("decoder.layers.2", "decoder.layers.3"))]
    assert len(record.gradients) == 2 * (ALL - 3) // 4 + 1
    status, found = replay(trainer, capsys)
    assert status == 1
    assert found["differences"] == ["the gradient norm", "which gradients are not finite"]


def test_a_step_that_is_skipped_leaves_the_biases_of_routers(start, capsys):
    """Megatron moves them before the norm is known: a skipped step takes that back, a dump has them as they were."""
    trainer = start(**raw_config("deepseek_v3", "v5"))
    (chunk,) = trainer.policy.model_chunks
    chunk.config.moe_router_bias_update_rate = 0.5
    biases = {name: b for name, b in chunk.named_buffers() if name.endswith("expert_bias")}
    assert biases and not any(b.any() for b in biases.values())
    batch = make_batch(count=4, vocab_size=raw_config("deepseek_v3", "v5")["vocab_size"])
    bad = copy.deepcopy(batch)
    bad[2].weights[-1] = np.nan
    assert trainer.step([bad[:2], bad[2:]]).skipped
    assert not any(b.any() for b in biases.values())
    accustomed(trainer, 1e-6)
    report = trainer.step([batch[:2], batch[2:]])
    assert report.spike and all(b.any() for b in biases.values())
    status, found = replay(trainer, capsys)
    assert (status, found["grad_norm"]) == (0, [report.grad_norm] * 2)


def accustomed(trainer, norm):
    """As if the norms before had all been ``norm``."""
    trainer.guard.load({"norms": [norm] * FEWEST, "skipped": 0, "skipped_in_a_row": 0})


def test_a_spike_is_taken_flagged_and_kept_as_it_was_before(start, capsys, caplog):
    trainer = start()
    usual = trainer.step(healthy())
    accustomed(trainer, usual.grad_norm)
    assert not trainer.step(healthy()).spike
    before = trainer.state()
    with caplog.at_level(logging.WARNING):
        report = trainer.step(healthy(scale=100))
    assert report.spike and not report.skipped
    assert "× the median of the last ones" in caplog.text
    assert any(not torch.equal(one, two) for one, two in zip(before, trainer.state(), strict=True))
    dump = open_dump(trainer.policy_out / trainer.dumps()[-1])
    again = start("again")
    again.policy.load_state(dump.state)
    assert all(torch.equal(one, two) for one, two in zip(before, again.state(), strict=True))
    status, found = replay(trainer, capsys)
    assert (status, found["verdict"]) == (0, "spike")
    assert found["grad_norm"][0] == report.grad_norm > 10 * usual.grad_norm
    assert found["grad_norm"][1] == pytest.approx(report.grad_norm, rel=1e-6)
    assert found["gradients"] == [[], []]


def test_adapters_replay_beside_the_model_they_belong_to(start, capsys):
    trainer = start(lora=4)
    batch = make_batch(count=4, vocab_size=raw_config("qwen3", "v5")["vocab_size"])
    for _ in range(2):  # the product of the adapters is 0 before the first step
        trainer.step([batch])
    accustomed(trainer, 1e-3)
    report = trainer.step([batch])
    assert report.spike
    status, found = replay(trainer, capsys)
    assert (status, found["grad_norm"]) == (0, [report.grad_norm] * 2)


def test_a_replay_under_other_settings_says_what_differs(start, capsys):
    trainer = start(algorithm={"kl": {"coef": 0.1}})
    accustomed(trainer, 1e-3)
    rows = healthy()
    for datum in (d for row in rows for d in row):
        datum.reference_logprobs = datum.behaviour_logprobs
    assert trainer.step(rows).spike
    status, found = replay(trainer, capsys, "algorithm.kl.coef=0.2")
    assert (status, found["differences"]) == (1, ["the gradient norm", "the loss", "the losses of 3 of 3 rows"])


def test_spikes_leave_a_place_for_what_is_not_finite(start, monkeypatch):
    trainer, bad = start(safety={"max_dumps": 2}), healthy(scale=float("nan"))
    monkeypatch.setattr(trainer.policy, "save_state", lambda path: path.mkdir())
    for _ in range(2):
        accustomed(trainer, 1e-3)
        assert trainer.step(healthy()).spike
    assert trainer.dumps() == ["step-000001.0"]
    for _ in range(2):
        assert trainer.step(bad).skipped
    assert trainer.dumps() == ["step-000001.0", "step-000003.0"]
    # A run that goes on counts what it finds.
    again = StepGuard(trainer.config, trainer.policy, TorchCommunicator())
    assert not again._dumps.room(Verdict.NOT_FINITE)


def test_no_dumps_when_none_are_wanted(start, caplog):
    trainer = start(safety={"max_dumps": 0, "spike_factor": None})
    accustomed(trainer, 1e-3)
    assert not trainer.step(healthy()).spike
    with caplog.at_level(logging.WARNING):
        assert trainer.step(healthy(scale=float("nan"))).skipped
    assert trainer.dumps() == []
    assert "replay" not in caplog.text


def test_a_dump_that_cannot_be_written_does_not_end_the_run(start, caplog, monkeypatch):
    trainer = start()

    def full(path):
        path.mkdir()
        raise OSError("disk full")

    monkeypatch.setattr(trainer.policy, "save_state", full)
    with caplog.at_level(logging.WARNING):
        assert trainer.step(healthy(scale=float("nan"))).skipped
    assert "could not be kept for replay: disk full" in caplog.text
    assert trainer.dumps() == []
    assert not trainer.step(healthy()).skipped


def test_a_run_that_only_skips_stops_and_goes_on_from_its_state(start):
    trainer, bad = start(safety={"max_skipped_in_a_row": 2, "max_dumps": 0}), healthy(scale=float("nan"))
    trainer.step(bad)
    trainer.step(healthy())
    trainer.step(bad)
    assert not trainer.guard.stuck
    trainer.guard.stop_if_stuck()
    state = json.loads(json.dumps(trainer.guard.state()))
    assert trainer.step(bad).skipped_total == 3
    assert trainer.guard.stuck
    with pytest.raises(UserError, match=r"2 updates in a row .*policy\.safety\.max_skipped_in_a_row=2.*output_layer"):
        trainer.guard.stop_if_stuck()
    stopped = json.loads(json.dumps(trainer.guard.state()))
    trainer.guard.load(state)
    assert trainer.step(bad).skipped_total == 3 and trainer.guard.stuck
    trainer.guard.load(stopped)
    assert trainer.step(bad).skipped_total == 4 and not trainer.guard.stuck


def test_rows_and_their_losses_stay_untouched(start):
    """Looking on changes nothing: a guarded step is the step."""
    rows = healthy()
    kept = copy.deepcopy(rows)
    guarded = start()
    reports = [guarded.step(rows) for _ in range(2)]
    state = guarded.state()
    plain = start("plain")
    loss = make_loss(plain.config.algorithm)
    for report in reports:
        plain.policy.forward_backward(kept, loss)
        assert plain.policy.optim_step(1e-3) == report
    assert all(torch.equal(one, two) for one, two in zip(state, plain.state(), strict=True))

"""`mfleet tune precision`: what is tried, what is measured, what is said of it."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("hydra")
pytest.importorskip("torch")

import numpy as np
import torch
from safetensors.torch import load_file

from megatron_fleet.cli import main
from megatron_fleet.config.load import ROOT, load
from megatron_fleet.trainer.precision import Machine
from megatron_fleet.tuning import search, tune_precision
from megatron_fleet.tuning.trial import random_micro_batch
from megatron_fleet.tuning.truncate import truncate, truncated_config
from megatron_fleet.tuning.tune_precision import PrecisionCandidate, PrecisionReport, candidates
from megatron_fleet.weights.hf_model import open_model

TINY = ROOT / "assets" / "tiny"


def configured(*overrides):
    return load(["experiment=quickstart", *overrides])


def test_the_machine_decides_what_is_tried():
    on_cpu = {row.name: row.problem for row, _ in candidates(configured(), Machine())}
    assert list(on_cpu) == ["float32", "bfloat16", "fp8_tensorwise", "fp8_blockwise", "fp8_delayed"]
    assert [name for name, problem in on_cpu.items() if problem is None] == ["float32", "bfloat16"]
    on_h100 = {row.name: row.problem for row, _ in candidates(configured(), Machine((9, 0), (12, 4), (2, 8)))}
    assert list(on_h100) == ["bfloat16", "fp8_tensorwise", "fp8_blockwise", "fp8_delayed"]
    assert [name for name, problem in on_h100.items() if problem] == ["fp8_blockwise"]


def test_candidates_differ_in_precision_alone():
    config = configured("parallel=data2", "policy.micro_batch_tokens=1100", "policy.optimizer.betas=[0.9,0.95]")
    trees = {row.name: its.model_dump() for row, its in candidates(config, Machine())}
    for tree in trees.values():
        assert tree["policy"]["micro_batch_tokens"] == 1152 and tree["parallel"]["data"] == 1
        assert tree["policy"]["optimizer"]["betas"] == (0.9, 0.95)
    assert trees["fp8_delayed"]["precision"]["recipe"] == "fp8_delayed"
    assert trees["fp8_delayed"]["model"]["dtype"] == trees["bfloat16"]["model"]["dtype"] == "bfloat16"
    for tree in trees.values():
        del tree["precision"], tree["model"]["dtype"]
    assert all(tree == trees["float32"] for tree in trees.values())


def test_the_first_layers_are_a_model_of_their_own(tmp_path):
    assert truncate(str(TINY), 2, tmp_path)
    model = open_model(tmp_path)
    assert model.table.model.layers == 2 and not model.passthrough
    whole, part = load_file(TINY / "model.safetensors"), {}
    for file in tmp_path.glob("*.safetensors"):
        part |= load_file(file)
    assert part.keys() == {name for name in whole if ".layers.2." not in name and ".layers.3." not in name}
    assert all(torch.equal(part[name], whole[name]) for name in part)


def test_a_folder_without_weights_gives_only_a_configuration(tmp_path):
    (tmp_path / "source").mkdir()
    (tmp_path / "out").mkdir()
    raw = json.loads((TINY / "config.json").read_text())
    (tmp_path / "source" / "config.json").write_text(json.dumps(raw))
    assert not truncate(str(tmp_path / "source"), 1, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == raw | {"num_hidden_layers": 1}


def test_lists_by_layer_are_cut_and_what_is_gone_is_not_announced():
    raw = json.loads((TINY / "config.json").read_text())
    raw |= {"layer_types": ["full_attention"] * 4, "quantization_config": {"quant_method": "fp8"}}
    cut = truncated_config(raw, 3)
    assert cut["layer_types"] == ["full_attention"] * 3 and "quantization_config" not in cut
    assert truncated_config(raw, 9)["num_hidden_layers"] == 4


@pytest.mark.parametrize(("tokens", "longest"), [(128, 50), (101, 50), (64, 64)])
def test_micro_batches_are_full_and_weigh_one(tokens, longest):
    data = random_micro_batch(tokens, longest, 11)
    assert tokens - 1 <= sum(map(len, data)) <= tokens and max(map(len, data)) <= longest
    assert sum(datum.scaled_advantages.sum() for datum in data) == pytest.approx(1)
    assert all(not datum.loss_mask[0] and datum.token_ids.max() < 11 for datum in data)


def report(weights=True, **seconds):
    """A report with these step times; ``None`` = did not run."""
    rows = [
        PrecisionCandidate(n, (f"model.dtype={n}",), None if s else "broken", [s or 0.0] * 3, mean=0.01)
        for n, s in seconds.items()
    ]
    return PrecisionReport("a machine", 2, 128, weights, rows)


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (
            report(float32=2.0, bfloat16=1.0),
            "bfloat16 is 2.00 times as fast as float32 (model.dtype=bfloat16) and moves",
        ),
        (report(float32=2.0, bfloat16=1.0), "by 0.0100 nats on average in 2 layers"),
        (report(weights=False, float32=2.0, bfloat16=1.0), "as these are random"),
        (report(float32=1.0, bfloat16=2.0), "Stay with float32"),
        (report(float32=1.0, bfloat16=None), "Only float32 can run here"),
        (report(float32=None, bfloat16=1.0), "float32 itself did not run"),
    ],
)
def test_what_is_recommended(found, text):
    assert text in found.recommendation()
    assert found.recommendation() in tune_precision.to_text(found)


@pytest.mark.parametrize(("weights", "chosen"), [(True, "bfloat16"), (False, "float32")])
def test_the_choice_is_written(monkeypatch, tmp_path, weights, chosen):
    """With random weights, of which log-probs say nothing, that is the reference."""
    found = report(weights, float32=2.0, bfloat16=1.0)
    monkeypatch.setattr(tune_precision, "trials", lambda _: 1)
    monkeypatch.setattr(tune_precision, "tune", lambda *_: found)
    assert tune_precision.main(configured(), 1, 1, True, tmp_path / "tuned.txt") == 0
    assert (tmp_path / "tuned.txt").read_text().splitlines()[1:] == [f"model.dtype={chosen}"]


def test_a_precision_is_written_whole():
    for row, its in candidates(configured(), Machine()):
        assert row.settings == (f"model.dtype={its.model.dtype}", f"precision.recipe={its.precision.recipe}")


def test_noise_is_not_taken_for_speed():
    slow, fast = (
        PrecisionCandidate("slow", (), None, [1.0, 1.1, 1.4]),
        PrecisionCandidate("fast", (), None, [0.8, 0.9, 1.0]),
    )
    assert fast.clearly_below(slow) and not slow.clearly_below(fast)
    assert not PrecisionCandidate("", (), None, [0.8, 0.9, 1.2]).clearly_below(slow)
    assert not PrecisionCandidate("", (), None, [0.8, 1.05, 1.06]).clearly_below(slow)
    found = PrecisionReport("", 2, 128, True, [slow, PrecisionCandidate("fast", (), None, [0.8, 0.9, 1.2])])
    assert "Stay with slow" in found.recommendation()


def test_the_comparison_is_that_of_log_probs():
    row = PrecisionCandidate("bfloat16", ())
    tune_precision._compare(row, np.array([-1.0, -2.5], np.float32), np.array([-1.5, -2.5], np.float32))
    assert (row.mean, row.most) == (0.25, 0.5)
    assert row.kl == pytest.approx((np.exp(0.5) - 1.5) / 2)


def test_a_process_that_dies_is_a_row(monkeypatch, tmp_path):
    monkeypatch.setattr(search.sys, "executable", "false")
    found = report(float32=1.0)
    tune_precision._trial(tmp_path, found.rows[0], configured(), found, 1, {})
    assert "ended with status 1" in found.rows[0].problem


@pytest.mark.slow
@pytest.mark.nightly(minutes=0.5)
def test_it_measures_here(capsys):
    pytest.importorskip("megatron_fleet.trainer.megatron")
    small = ["policy.micro_batch_tokens=128", "rollout.max_context=64", "rollout.sampling.max_tokens_per_turn=16"]
    arguments = ["tune", "precision", "experiment=quickstart", *small, "--layers", "1", "--repeats", "1", "--json"]
    assert main(arguments) == 0
    found = json.loads(capsys.readouterr().out)
    rows = {row["name"]: row for row in found["rows"]}
    assert found["weights"] and found["layers"] == 1 and found["tokens"] == 128
    if found["reference"] == "float32":
        assert rows["float32"]["mean"] == rows["float32"]["kl"] == 0
        assert 1e-4 < rows["bfloat16"]["mean"] < rows["bfloat16"]["most"] < 1
        assert len(rows["bfloat16"]["seconds"]) == tune_precision.ROUNDS and rows["bfloat16"]["median"] > 0
        assert "needs a CUDA device" in rows["fp8_blockwise"]["problem"]


def test_bad_input_is_one_line(capsys):
    assert main(["tune", "precision", "experiment=quickstart", "--layers", "0"]) == 2
    assert "--layers=0 must be at least 1" in capsys.readouterr().err

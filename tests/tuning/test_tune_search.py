"""`mfleet tune trainer` and `engine`: what is tried and chosen, and the file that a run takes."""

from __future__ import annotations

import json
import signal
import subprocess

import numpy as np
import pytest

pytest.importorskip("hydra")
pytest.importorskip("torch")

from megatron_fleet.cli import main
from megatron_fleet.config.errors import UserError
from megatron_fleet.config.load import load
from megatron_fleet.tuning import search, tune_engine, tune_trainer
from megatron_fleet.tuning.override_file import write_overrides
from megatron_fleet.tuning.search import Candidate, describe_failure, fastest
from megatron_fleet.tuning.show import Report, to_json, to_text

SMALL = (
    "experiment=quickstart", "policy.micro_batch_tokens=128", "rollout.max_context=64",
    "rollout.sampling.max_tokens_per_turn=16",
)  # fmt: skip


def compose(settings):
    return load([*SMALL, *settings])


def candidate(name, *seconds, problem=None):
    return Candidate(name, (f"policy.threads={len(name)}",), problem, list(seconds))


def test_the_first_stays_unless_another_is_faster_beyond_the_noise():
    own, noisy, fast = candidate("own", 1.0, 1.1), candidate("noisy", 0.8, 1.05), candidate("fast", 0.5, 0.6)
    assert fastest([own, noisy]) is own and fastest([own, noisy, fast]) is fast
    broken = candidate("broken", problem="it cannot")
    assert fastest([broken, noisy, fast]) is fast and fastest([broken]) is None


class OutOfMemoryError(RuntimeError):
    """As torch's."""


def test_memory_that_was_too_short_is_a_result_of_its_own(monkeypatch, tmp_path):
    for error in (
        OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nmore"),
        MemoryError("2 GiB"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
    ):
        said = describe_failure(error)
        assert candidate("x", problem=said).out_of_memory and "\n" not in said
    assert describe_failure(ValueError("no")) == "ValueError: no"
    assert not candidate("x", problem="ValueError: no").out_of_memory
    killed = subprocess.CompletedProcess([], -signal.SIGKILL, "", "")
    monkeypatch.setattr(search.subprocess, "run", lambda *_, **__: killed)
    _, result = search.run_trial("module", {}, tmp_path)
    assert candidate("x", problem=result["problem"]).out_of_memory


@pytest.fixture
def trials(monkeypatch, tmp_path):
    """The configurations that would have been measured; 256 tokens do not fit without recomputation."""
    run = []

    def run_trial(module, request, scratch):
        config = search.Config.model_validate(request["config"])
        run.append(config)
        policy = config.policy
        assert module == "megatron_fleet.tuning.trial" and config.model.path != compose(()).model.path
        if policy.recompute == "none" and policy.micro_batch_tokens >= 256:
            return scratch, {"problem": "out of memory: no"}
        tokens_per_s = {"none": 1000, "full": 800}[policy.recompute] * (1 if policy.micro_batch_tokens < 256 else 2)
        seconds = policy.micro_batch_tokens / tokens_per_s / (2 if policy.logprob_chunk == 64 else 1)
        result = {"micro_batch_seconds": [seconds] * 2, "peak_bytes": 1 << 30, "device": "a machine"}
        return scratch, result

    monkeypatch.setattr(tune_trainer, "run_trial", run_trial)
    return run


def test_a_number_of_recomputed_layers_is_the_same_share_of_fewer_layers():
    def share(recompute: int, *more: str) -> object:
        return tune_trainer._same_share(compose([f"policy.recompute={recompute}", *more]), 2)

    assert (share(1), share(2), share(3), share(4)) == ("none", 1, 2, 2)  # of four layers
    assert share(1, "parallel.pipeline=2") == 1
    with pytest.raises(UserError, match=r"policy\.recompute=5 is above the 4 layers"):
        share(5)


@pytest.mark.slow
def test_the_trainers_settings_are_searched(trials):
    choices = tune_trainer.Choices.of(compose(()), [256, 512], ["full"], [32, 64])
    assert (choices.micro_batches, choices.recompute) == ([128, 256, 512], ["none", "full"])
    advanced = []
    report = tune_trainer.tune(compose, choices, 1, 2, lambda: advanced.append(1))
    assert len(advanced) == len(report.rows) == choices.trials == 8
    assert report.rows[0].settings == ("policy.recompute=none", "policy.micro_batch_tokens=128")
    problems = {row.settings[:2]: row.problem for row in report.rows if row.problem}
    assert problems == {
        ("policy.recompute=none", "policy.micro_batch_tokens=256"): "out of memory: no",
        ("policy.recompute=none", "policy.micro_batch_tokens=512"): "out of memory: a smaller micro-batch did not fit",
    }
    assert len(trials) == 7, "a micro-batch above one that did not fit is not run"
    assert report.choice.settings == (
        "policy.recompute=full", "policy.micro_batch_tokens=256", "policy.logprob_chunk=64"
    )  # fmt: skip
    assert report.choice.median == pytest.approx(1000 / 1600 / 2)
    assert "3.20 times as fast" in report.recommendation() and "out of memory: no" in to_text(report)
    assert json.loads(to_json(report))["choice"] == list(report.choice.settings)


def test_values_come_from_the_longest_sequence_and_the_configuration():
    choices = tune_trainer.Choices.of(compose(["policy.recompute=[mlp]", "policy.kernels=auto"]), [], [], [])
    assert choices.micro_batches == [128, 64, 256] and choices.recompute == ["[mlp]", "none", "full"]
    assert choices.chunks == [1024, 4096, 16384]


def test_what_cannot_be_run_is_a_row(trials):
    choices = tune_trainer.Choices.of(compose(()), [32], ["[moe_act]"], [64])
    report = tune_trainer.tune(compose, choices, 1, 1, lambda: None)
    problems = [row.problem for row in report.rows if row.problem]
    assert any("policy.micro_batch_tokens=32" in problem for problem in problems)
    assert any("moe_act" in problem for problem in problems)
    assert report.choice.settings[-1] == "policy.logprob_chunk=64"


@pytest.fixture
def engines(monkeypatch, tmp_path):
    """Settings of the engines that would have been measured."""
    run = []

    def run_trial(module, request, scratch, environment):
        config = search.Config.model_validate(request["config"]).rollout.engine
        run.append((config.max_num_seqs, config.enforce_eager, config.kv_cache_dtype))
        assert module == "megatron_fleet.tuning.engine_trial" and "VLLM_LOGGING_LEVEL" in environment
        if config.max_num_seqs == 9:
            return scratch, {"problem": "out of memory: no"}
        seconds = 1.0 / (1 + (config.max_num_seqs == 8) + config.enforce_eager + 4 * (config.kv_cache_dtype == "fp8"))
        np.save(scratch / "scores.npy", np.full(3, -1.0 - 0.25 * (config.kv_cache_dtype == "fp8")))
        return scratch, {"seconds": [seconds] * 2, "peak_bytes": 0, "figures": {"running": 2.0}, "device": "a machine"}

    monkeypatch.setattr(tune_engine, "run_trial", run_trial)
    return run


LOAD = tune_engine.Load(sequences=4, prompt=8, answer=250)


def test_the_best_of_each_key_are_measured_together(engines):
    asked = [f"rollout.engine.{text}" for text in ("max_num_seqs=7", "max_num_seqs=8", "max_num_seqs=9")]
    asked.append("rollout.engine.enforce_eager=true")
    advanced = []
    report = tune_engine.tune(compose, LOAD, asked, 2, lambda: advanced.append(1))
    assert len(advanced) == tune_engine.trials(asked) == 6
    assert report.choice.settings == ("rollout.engine.max_num_seqs=8", "rollout.engine.enforce_eager=true")
    assert report.choice.median == pytest.approx(1 / 3) and engines[-1] == (8, True, "auto")
    assert [row.problem for row in report.rows if row.problem] == ["out of memory: no"]
    assert "3.00 times as fast" in report.recommendation()


def test_formats_are_measured_and_chosen_only_when_asked_for(engines, monkeypatch):
    fp8 = "rollout.engine.kv_cache_dtype=fp8"
    monkeypatch.setattr(tune_engine, "TRIED", ("rollout.engine.max_num_seqs=8",))
    monkeypatch.setattr(tune_engine, "FORMATS", (fp8,))
    report = tune_engine.tune(compose, LOAD, [], 1, lambda: None)
    assert report.choice.settings == ("rollout.engine.max_num_seqs=8",)
    (row,) = (row for row in report.rows if row.settings == (fp8,))
    assert row.figures[tune_engine.DIFFERENCE] == 0.25 and row.median < report.choice.median
    assert tune_engine.tune(compose, LOAD, [fp8], 1, lambda: None).choice.settings == (fp8,)


def test_a_load_fits_the_context():
    load_ = tune_engine.Load.of(
        compose(["rollout.episodes_in_flight=40", "rollout.engine.replicas=2"]).rollout, None, None, None
    )
    assert (load_.sequences, load_.prompt, load_.answer) == (20, 48, 16)
    with pytest.raises(UserError, match=r"--prompt=60 and --answer=16 together exceed rollout\.max_context=64"):
        tune_engine.Load.of(compose(()).rollout, None, 60, None)


def test_a_report_without_a_choice_says_so():
    report = Report("title", "", [candidate("own", problem="no")])
    assert report.recommendation() == "Nothing ran." and "own: no" in to_text(report)
    assert json.loads(to_json(report))["choice"] is None


def test_a_run_takes_the_file(tmp_path, capsys):
    file = tmp_path / "tuned.txt"
    file.write_text("# by hand\n\npolicy.threads=2\npolicy.recompute=none\n")
    write_overrides(file, ("policy.recompute=[mlp,layernorm]", "policy.micro_batch_tokens=8192"))
    write_overrides(file, ("rollout.engine.max_num_seqs=8",))
    lines = file.read_text().splitlines()
    assert lines[0].startswith("# ") and lines[1:] == [
        "policy.threads=2", "policy.recompute=[mlp,layernorm]", "policy.micro_batch_tokens=8192",
        "rollout.engine.max_num_seqs=8",
    ]  # fmt: skip
    out = ["run.out=" + str(tmp_path / "run")]
    assert main(["config", "experiment=quickstart", f"@{file}", "policy.threads=3", *out]) == 0
    shown = capsys.readouterr().out
    assert "micro_batch_tokens: 8192" in shown and "max_num_seqs: 8" in shown and "threads: 3" in shown
    assert "- layernorm" in shown
    assert main(["train", "--dry-run", "experiment=quickstart", *out, f"@{file}"]) == 0


def test_a_file_that_is_missing_is_refused(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["config", "experiment=quickstart", "@no/such/file"])
    assert "no/such/file" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["policy.threads", "\udcff"])
def test_a_file_of_something_else_is_not_overwritten(tmp_path, content):
    file = tmp_path / "notes.txt"
    file.write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(UserError, match=r"notes\.txt:? .*name another file"):
        write_overrides(file, ("policy.threads=1",))
    assert file.read_bytes() == content.encode("utf-8", "surrogateescape")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["trainer", "--layers", "0"], "--layers=0 must be at least 1"),
        (["trainer", "--micro-batch", "0"], "--micro-batch=0 must be at least 1"),
        (["engine", "--sequences", "0"], "--sequences=0 must be at least 1"),
        (["engine", "--prompt", "99999999"], "together exceed rollout.max_context"),
    ],
)
def test_bad_input_is_one_line(capsys, arguments, said):
    assert main(["tune", *arguments, "experiment=quickstart"]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.nightly(minutes=1)
def test_a_run_takes_what_was_measured_here(tmp_path, capsys):
    pytest.importorskip("megatron_fleet.trainer.megatron")
    pytest.importorskip("vllm")
    file = tmp_path / "tuned.txt"
    shared = ["--repeats", "1", "--json", "--write", str(file)]
    tried = ["--layers", "1", "--micro-batch", "128", "--recompute", "none", "--chunk", "32"]
    assert main(["tune", "trainer", *SMALL, *tried, *shared]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["problem"] for row in found["rows"]] == [None] * 2 and found["device"].startswith(("CPU", "NVIDIA"))
    assert main(["tune", "engine", *SMALL, "--try", "rollout.engine.max_num_seqs=1", "--sequences", "4", *shared]) == 0
    found = json.loads(capsys.readouterr().out)
    own, alone = found["rows"]
    assert own["problem"] is alone["problem"] is None
    assert alone["figures"]["running"] <= 1 < own["figures"]["running"]
    assert alone["figures"][tune_engine.DIFFERENCE] < 1e-3
    assert main(["train", "--dry-run", *SMALL, f"run.out={tmp_path / 'run'}", f"@{file}"]) == 0
    assert "policy.micro_batch_tokens=128" in file.read_text().splitlines()

"""Exports while training goes on: whole or not there, done again after a kill, kept, checked and sent as configured."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from s3_server import BUCKET, found_by_boto3
from test_training import Run
from waiting import HANG_S, wait_until

from megatron_fleet.checkpoint import exports as module
from megatron_fleet.checkpoint.checkpoints import Checkpoint, Checkpoints
from megatron_fleet.checkpoint.exports import Exports, open_exports, upload, wanted
from megatron_fleet.checkpoint.store import RunStore
from megatron_fleet.config.errors import UserError
from megatron_fleet.config.load import load
from megatron_fleet.config.validate import check
from megatron_fleet.storage.open import open_folder

PROGRAM = (sys.executable, str(Path(__file__).with_name("export_program.py")))
KILLED = """
import sys, threading
from test_exports import Made
Made(sys.argv[1], "checkpoint.export.every=1").exports()
threading.Event().wait()
"""


class Made:
    """The folder of a run with checkpoints of a few bytes."""

    def __init__(self, out: Path | str, *overrides: str, store: RunStore | None = None):
        self.out, self.store = Path(out), store
        more = ("checkpoint.interval=1", "run.steps=9", "run.id=me", *overrides)
        self.config = load(["experiment=quickstart", f"run.out={out}", *more])
        self.checkpoints = Checkpoints(self.out / "checkpoints", self.config.checkpoint.keep)
        self.out.mkdir(exist_ok=True)
        self.opened: Exports | None = None

    def save(self, step: int, weights: str = "", **state: object) -> Checkpoint:
        async def write(path: Path):
            (path / "weights").write_text(weights or f"of step {step}")
            return {}

        saved = asyncio.run(self.checkpoints.save(step, write, {"step": step, **state}))
        assert saved is not None
        if self.opened is not None:
            self.opened.refresh()
        return saved

    def score(self, **scores: float) -> None:
        rows = [{"step": int(step[1:]), "time": 0.0, "eval/all/pass_at_1": value} for step, value in scores.items()]
        (self.out / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def order(self, **orders: object) -> None:
        (self.out / "orders.new").write_text(json.dumps(orders))
        (self.out / "orders.new").rename(self.out / "orders")

    def exports(self) -> Exports:
        self.opened = Exports(self.config, self.checkpoints, self.store, PROGRAM)
        return self.opened

    def calls(self) -> list[str]:
        path = self.out / "calls"
        return [" ".join(line.split()[:2]) for line in path.read_text().splitlines()] if path.exists() else []

    def steps(self, folder: str = "exports") -> list[str]:
        return sorted(path.name for path in (self.out / folder).glob("[!.]*") if path.is_dir())


@pytest.fixture
def make(tmp_path):
    """Makes a `Made` in a folder; its exports are closed at the end of the test."""
    made = []

    def make(*overrides: str, store: RunStore | None = None) -> Made:
        made.append(Made(tmp_path / "run", *overrides, store=store))
        return made[-1]

    yield make
    for run in made:
        if run.opened is not None:
            run.opened.close()


@pytest.fixture(scope="module")
def s3():
    with found_by_boto3() as server:
        yield server


@pytest.fixture(params=["disk", "s3"])
def store(request, tmp_path):
    """A run's store whose attempt has begun."""
    if request.param == "s3":
        request.getfixturevalue("s3")
    made = RunStore(str(tmp_path / "store") if request.param == "disk" else f"s3://{BUCKET}/{tmp_path.name}")
    made.begin_attempt()
    return made


def test_the_newest_that_are_due_and_the_best_are_wanted():
    scores = {5: 0.9, 10: 0.5, 20: 0.7}
    export = load(["experiment=quickstart"]).checkpoint.export
    due = export.model_copy(update={"every": 10, "keep": 2})
    assert wanted([5, 10, 15, 20, 25, 30], due, scores) == {20, 30}
    assert wanted([5, 10, 15, 20, 25, 30], due.model_copy(update={"best": True}), scores) == {5, 20, 30}
    assert wanted([5, 10], export, scores) == set()


def test_exports_are_made_at_the_lowest_priority_and_the_oldest_go(make):
    run = make("checkpoint.export.every=2", "checkpoint.export.keep=2")
    exports = run.exports()
    for step in (1, 2, 3, 4, 6):
        run.save(step)
        wait_until(lambda step=step: exports.metrics()["checkpoint/exports"] == step // 2)
    wait_until(lambda: run.steps() == ["step_000004", "step_000006"])
    assert (run.out / "exports" / "step_000006" / "model.safetensors").read_text() == "of step 6"
    assert run.calls() == ["to-hf step_000002", "to-hf step_000004", "to-hf step_000006"]
    assert {line.split()[-1] for line in (run.out / "calls").read_text().splitlines()} == {"19"}
    assert exports.metrics()["checkpoint/exports"] == 3 and exports.metrics()["checkpoint/exports_waiting"] == 0


def test_a_checkpoint_is_kept_while_it_is_read_or_waits_for_that(make):
    run = make("checkpoint.export.every=2", "checkpoint.keep=1")
    run.order(hold=True)
    exports = run.exports()
    for step in (2, 3, 4, 5):
        run.save(step)
    wait_until(run.calls)
    assert run.steps("checkpoints") == ["step_000002", "step_000004", "step_000005"]
    assert exports.metrics()["checkpoint/exports_waiting"] == 2
    assert run.steps() == []  # none is visible before it is whole
    run.order()
    exports.finish(HANG_S)
    run.save(6)
    assert run.steps("checkpoints")[-1:] == ["step_000006"] and "step_000002" not in run.steps("checkpoints")
    exports.finish(HANG_S)
    wait_until(lambda: run.steps() == ["step_000004", "step_000006"])


def test_the_best_follows_the_metric_even_when_it_comes_late(make):
    run = make("checkpoint.export.best=true", "checkpoint.keep_best=eval/all/pass_at_1", "checkpoint.keep=9")
    exports = run.exports()
    run.save(1)
    run.save(2)
    run.score(s1=0.5)
    exports.refresh()
    exports.finish(HANG_S)
    assert run.steps() == ["step_000001"]
    run.score(s1=0.5, s2=0.7)
    run.save(3)
    exports.finish(HANG_S)
    wait_until(lambda: run.steps() == ["step_000002"])


def test_what_fails_is_an_alert_and_is_tried_again_with_the_next_checkpoints(make, caplog):
    run = make("checkpoint.export.every=1", "checkpoint.export.keep=1", "checkpoint.keep=1")
    run.order(fail="the disk is full")
    exports = run.exports()
    run.save(1)
    wait_until(lambda: exports.metrics()["checkpoint/exports_failed"] == 1)
    [record] = [record for record in caplog.records if getattr(record, "alert", None)]
    assert record.alert == ("checkpoint", "export")
    assert "step_000001 was not exported: its process ended with status 2 (error: the disk is full)" in record.message
    assert exports.needed() == {1}
    for failed in (2, 3):
        exports.refresh()
        wait_until(lambda failed=failed: exports.metrics()["checkpoint/exports_failed"] == failed)
    exports.refresh()
    assert exports.needed() == set()  # given up: it holds no checkpoint any more
    run.order()
    run.save(2)
    exports.finish(HANG_S)
    assert run.steps() == ["step_000002"]
    assert exports.metrics()["checkpoint/exports_failed"] == 3


@pytest.mark.slow
def test_an_export_ends_with_its_run_and_is_done_again_by_the_next_attempt(make):
    run = make("checkpoint.export.every=1")
    run.save(1)
    run.order(hold=True)
    owner = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(run.out)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
    wait_until(run.calls, meanwhile=lambda: owner.poll() is None)
    pid = int((run.out / "calls").read_text().split()[2])
    wait_until((run.out / "exports" / ".step_000001.partial" / "model.safetensors").exists)
    os.kill(owner.pid, signal.SIGKILL)
    owner.wait()
    wait_until(lambda: not Path(f"/proc/{pid}").exists())
    assert run.steps() == []
    run.order()
    run.exports().finish(HANG_S)
    assert run.steps() == ["step_000001"]


def test_closing_ends_the_process_at_once_and_leaves_nothing_that_looks_whole(make):
    run = make("checkpoint.export.every=1")
    run.save(1)
    run.order(hold=True)
    exports = run.exports()
    wait_until(run.calls)
    pid = int((run.out / "calls").read_text().split()[2])
    assert os.getpriority(os.PRIO_PROCESS, pid) == 19
    exports.finish(0)  # training is over, nothing else needs the cores
    assert os.getpriority(os.PRIO_PROCESS, pid) == (19 if os.geteuid() else os.getpriority(os.PRIO_PROCESS, 0))
    exports.close()
    assert not Path(f"/proc/{pid}").exists()
    assert run.steps() == []


@pytest.mark.slow
def test_exports_are_what_the_converter_makes_byte_for_byte(make, tmp_path):
    def convert(command: str, source: Path, out: Path) -> None:
        command = [sys.executable, "-m", "megatron_fleet.cli", "convert", command, source, out, "--workers", "1"]
        subprocess.run(command, check=True, capture_output=True, timeout=HANG_S)

    run = make("checkpoint.export.every=1")
    model = Path(run.config.model.path)
    convert("to-megatron", model, tmp_path / "megatron")

    async def write(path: Path):
        for file in (tmp_path / "megatron" / "release").iterdir():
            (path / file.name).write_bytes(file.read_bytes())
        return {}

    saved = asyncio.run(run.checkpoints.save(1, write, {"step": 1}))
    run.opened = Exports(run.config, run.checkpoints, None)
    run.opened.finish(HANG_S)
    exported = {path.name: path.read_bytes() for path in (run.out / "exports" / "step_000001").iterdir()}
    (run.out / "config.json").write_text(json.dumps({"model": {"path": str(model)}}))  # as a run leaves it
    convert("to-hf", saved.path, tmp_path / "converted")
    assert exported == {path.name: path.read_bytes() for path in (tmp_path / "converted").iterdir()}
    for name in ("model.safetensors", "tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert exported[name] == (model / name).read_bytes()


def test_exports_of_another_checkpoint_of_the_step_are_not_taken_for_this_ones(make):
    run = make("checkpoint.export.every=1")
    run.save(1, "one way")
    run.exports().finish(HANG_S)
    partial = run.out / "exports" / ".step_000002.partial"
    partial.mkdir()
    (partial / "conversion.json").write_text('{"manifest_sha256": "of another"}')
    (partial / "model-00001.safetensors").write_text("of another")
    run.opened.close()
    run.checkpoints.remove([run.checkpoints.path_of(1)])
    run.save(1, "another way")
    run.save(2)
    run.exports().finish(HANG_S)
    assert (run.out / "exports" / "step_000001" / "model.safetensors").read_text() == "another way"
    assert not (run.out / "exports" / "step_000002" / "model-00001.safetensors").exists()


def test_exports_of_steps_that_no_longer_count_are_set_aside(make):
    run = make("checkpoint.export.every=1")
    for step in (1, 2):
        run.save(step)
    run.exports().finish(HANG_S)
    run.opened.close()
    run.checkpoints.set_later_aside(1)
    with open_exports(run.config, run.checkpoints, None, Checkpoint(run.checkpoints.path_of(1), 1)):
        assert run.steps() == ["step_000001", "step_000002.superseded"]


def test_copies_in_the_store_are_whole_and_stay(make, store):
    run = make("checkpoint.export.every=1", "checkpoint.export.keep=1", store=store)
    exports = run.exports()
    (run.out / "hf").mkdir()
    (run.out / "hf" / "config.json").write_text("{}")
    (run.out / "hf" / "model.safetensors").write_text("the last")
    for step in (1, 2):
        run.save(step)
        wait_until(lambda step=step: exports.metrics()["checkpoint/exports"] == step)
        wait_until(lambda: exports.metrics()["checkpoint/exports_waiting"] == 0)
    exports.finish(HANG_S)
    names = {"config.json", "conversion.json", "model.safetensors", "export.json"}
    for step in (1, 2):
        folder = open_folder(f"{store.url}/exports/global_step_{step}")
        assert folder.sizes().keys() == names
        assert folder.read("model.safetensors") == f"of step {step}".encode()
    assert open_folder(f"{store.url}/hf").read("model.safetensors") == b"the last"
    assert store.steps() == []  # no reader takes an export for a checkpoint
    wait_until(lambda: run.steps() == ["step_000002"])


def test_an_interrupted_copy_is_gone_on_with_and_another_checkpoint_s_is_replaced(make, store, monkeypatch):
    run = make("checkpoint.export.every=1", store=store)
    run.save(1, "one way")
    copied, sent = module.transfer, []

    def fails_once(source, target, copies, *rest):
        copies = list(copies)
        sent.append([copy.source for copy in copies])
        copied(source, target, copies[:1] if len(sent) == 1 else copies, *rest)
        if len(sent) == 1:
            raise UserError("the network is down")

    monkeypatch.setattr(module, "transfer", fails_once)
    exports = run.exports()
    wait_until(lambda: exports.metrics()["checkpoint/exports_failed"] == 1)
    url = f"{store.url}/exports/global_step_1"
    assert "config.json" not in open_folder(url).sizes()
    exports.finish(HANG_S)
    assert sent == [["conversion.json", "model.safetensors"], ["model.safetensors"]]
    assert open_folder(url).read("model.safetensors") == b"one way"
    exports.close()
    run.checkpoints.remove([run.checkpoints.path_of(1)])
    run.save(1, "2nd way")
    run.exports().finish(HANG_S)
    assert open_folder(url).read("model.safetensors") == b"2nd way"


def test_an_unfinished_copy_of_another_checkpoint_is_not_gone_on_with(store, tmp_path, monkeypatch):
    source = tmp_path / "export"
    source.mkdir()
    (source / "config.json").write_text("{}")
    (source / "model.safetensors").write_text("one way")
    with monkeypatch.context() as patch, pytest.raises(UserError, match="down"):
        copied = module.transfer

        def fails(*arguments):
            copied(*arguments)
            raise UserError("the network is down")

        patch.setattr(module, "transfer", fails)
        upload(store, "exports/global_step_1", source, {"manifest_sha256": "1"}, threading.Event())
    (source / "model.safetensors").write_text("2nd way")  # as many bytes
    upload(store, "exports/global_step_1", source, {"manifest_sha256": "2"}, threading.Event())
    assert open_folder(f"{store.url}/exports/global_step_1").read("model.safetensors") == b"2nd way"


def test_an_attempt_that_was_replaced_sends_nothing(make, store):
    run = make("checkpoint.export.every=1", store=store)
    later = RunStore(store.url)
    later.begin_attempt()
    run.save(1)
    run.exports().finish(HANG_S)
    assert open_folder(f"{store.url}/exports/global_step_1").sizes() == {}


PROBE = {"tokens": [[1, 2]], "logprobs": [[0.0, -1.0]]}


@pytest.mark.parametrize(("mean", "good"), [(0.01, True), (0.2, False)])
def test_a_bad_export_is_an_alert_and_is_not_sent(make, tmp_path, caplog, mean, good):
    store = RunStore(str(tmp_path / "store"))
    store.begin_attempt()
    run = make("checkpoint.export.every=1", "checkpoint.export.check=true", store=store)
    run.order(mean=mean)
    run.save(1, probe=PROBE)
    exports = run.exports()
    exports.finish(HANG_S)
    assert run.calls() == ["to-hf step_000001", "check step_000001"]
    assert exports.metrics()["checkpoint/export_difference"] == mean
    alerts = [record.message for record in caplog.records if getattr(record, "alert", None)]
    sent = "config.json" in open_folder(f"{store.url}/exports/global_step_1").sizes()
    assert sent is good
    assert alerts == [] if good else "differ by 0.2 nats on average" in alerts[0]


@pytest.mark.slow
def test_on_gpus_checks_wait_until_the_run_has_left_them(make, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "cuda_is_installed", lambda: True)
    store = RunStore(str(tmp_path / "store"))
    store.begin_attempt()
    run = make("checkpoint.export.every=1", "checkpoint.export.check=true", "checkpoint.keep=1", store=store)
    exports = run.exports()
    for step in (1, 2):
        run.save(step, probe=PROBE)
        marker = Path(store.url, "exports", f"global_step_{step}", "config.json")
        wait_until(marker.exists)
    assert run.calls() == ["to-hf step_000001", "to-hf step_000002"]
    run.save(3, probe=PROBE)  # the first checkpoint goes, its probe stays
    assert "step_000001" not in run.steps("checkpoints")
    (run.out / "hf").mkdir()
    (run.out / "hf" / "config.json").write_text("{}")
    run.save(9, probe=PROBE)
    exports.finish(HANG_S)
    assert sorted(call for call in run.calls() if call.startswith("check")) == [
        "check hf",
        "check step_000003",
        "check step_000009",
    ]


async def test_the_trainer_s_log_probs_are_saved_where_a_check_is_wanted(tmp_path):
    run = Run(tmp_path / "run", "checkpoint.export.check=true", "run.steps=2")
    await run.go()
    assert [call for call in run.take() if call.startswith(("forward c", "copy"))] == ["copy_state", "forward current"]
    state = Checkpoint.open(run.out / "checkpoints" / "step_000002").trainer_state()
    assert {len(row) for row in (*state["probe"]["tokens"], *state["probe"]["logprobs"])} == {32}


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["checkpoint.export.every=7", "checkpoint.interval=5"], "every=7 is not a multiple of checkpoint.interval=5"),
        (["checkpoint.export.every=7", "checkpoint.interval=0"], "every=7 is not a multiple of checkpoint.interval=0"),
        (["checkpoint.export.best=true"], "checkpoint.export.best needs checkpoint.keep_best"),
        (["checkpoint.export.every=5", "policy.lora.rank=4"], "only the last step of a run with policy.lora.rank=4"),
    ],
)
def test_settings_that_export_nothing_are_refused(overrides, problem):
    with pytest.raises(UserError, match=problem):
        check(load(["experiment=quickstart", *overrides]))

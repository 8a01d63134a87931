"""W&B and MLflow get every number once, at its step; attempts are runs of one group."""

import json
import struct
import threading

import numpy as np
import pytest
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from run_maker import groups
from waiting import HANG_S, wait_until
from wandb.proto.wandb_internal_pb2 import Record

from megatron_fleet.config.errors import UserError
from megatron_fleet.telemetry import trackers
from megatron_fleet.telemetry.samples import choose
from megatron_fleet.telemetry.trackers import MlflowSink, WandbSink


def begin(folder, resumed=None, started=0.0, mode="offline", samples=0):
    return WandbSink("fleet", None, mode, "mine", folder, {"run": {"seed": 3}}, resumed, started, None, samples)


def records(data):
    """Content of an offline file: a head of 7 bytes, then a log of LevelDB's form, in blocks of 32 KiB."""
    at, parts = 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + 7])
        parts += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # the whole of a record, or its last part
            yield Record.FromString(parts)
            parts = b""


def finished(path):
    """All records of an attempt that was closed: W&B's writer ends a moment after it said so."""
    found = []

    def ended():
        found[:] = records(path.read_bytes())
        return found and found[-1].WhichOneof("record_type") == "exit"

    wait_until(ended)
    return found


def recorded(folder):
    """Group, name, configuration with the exit code, and rows of each attempt, in the order of their names."""
    attempts = []
    for path in folder.glob("wandb/offline-run-*/*.wandb"):
        rows, run = [], None
        for record in finished(path):
            if record.WhichOneof("record_type") == "run":
                run = record.run
            elif record.WhichOneof("record_type") == "history":
                row = {
                    item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item
                }
                rows.append({name: value for name, value in row.items() if not name.startswith("_")})
        config = {item.key: json.loads(item.value_json) for item in run.config.update}
        config["exit_code"] = record.exit.exit_code
        attempts.append((run.run_group, run.display_name, config, rows))
    return sorted(attempts, key=lambda attempt: attempt[1])


@pytest.mark.slow
def test_attempts_are_runs_of_one_group_over_the_training_step(tmp_path):
    first = begin(tmp_path)
    first.write(0, {"eval/all/pass_at_1": 0.25})
    first.write(1, {"reward/a:b/pass_at_1": 0.5, "policy/grad_norm": float("nan")})
    first.write(1, {"timing/eval": 2.0})
    first.close(complete=False)
    second = begin(tmp_path, resumed=1, started=60.0)
    second.write(2, {"reward/a:b/pass_at_1": 1})
    second.close()
    (group, name, config, rows), (other_group, other_name, other_config, other_rows) = recorded(tmp_path)
    assert (group, name) == ("mine", "mine 01-01 00:00:00") and (other_group, other_name) == (
        "mine",
        "mine 01-01 00:01:00",
    )
    assert config["run"] == {"seed": 3} and config["attempt"] == {"started": 0.0, "resumed_step": None}
    assert other_config["attempt"] == {"started": 60.0, "resumed_step": 1}
    assert (config["exit_code"], other_config["exit_code"]) == (1, 0)
    assert [row["trainer/global_step"] for row in rows] == [0, 1, 1]
    assert rows[0]["eval/all/pass_at_1"] == 0.25 and rows[2] == {
        "timing/eval": 2.0,
        "trainer/global_step": 1,
    }
    assert rows[1]["reward/a:b/pass_at_1"] == 0.5
    assert other_rows == [{"reward/a:b/pass_at_1": 1, "trainer/global_step": 2}]


def test_a_key_that_is_missing_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    with pytest.raises(UserError, match=r"logging\.wandb\.project=fleet: W&B refuses .* set WANDB_API_KEY"):
        begin(tmp_path, mode="online")


def test_a_histogram_belongs_to_its_step(tmp_path):
    sink = begin(tmp_path)
    sink.draw(3, {"distribution/turns": np.array([1.0, 1.0, 5.0])})
    sink.close()
    [(_, _, _, [row])] = recorded(tmp_path)
    assert row["trainer/global_step"] == 3
    drawn = {name: row[f"distribution/turns/{name}"] for name in ("_type", "values", "bins")}
    assert drawn["_type"] == "histogram" and sum(drawn["values"]) == 3
    assert (drawn["bins"][0], drawn["bins"][-1]) == (1.0, 5.0)


def test_a_few_episodes_of_a_step_are_a_table(tmp_path):
    sink = begin(tmp_path, samples=3)
    said = [
        ("system", "s" * 9_000),
        ("user", "do it"),
        ("assistant", "<think>hm</think>" + "a" * 20_000),
        ("tool", "ok"),
    ]
    collected = groups({f"t{i}": [0.0, None, 1.0] for i in range(9)}, messages=said) + groups({"b": [None]}, env="bank")
    sink.samples("train", 7, collected)
    sink.samples("eval", 7, [])
    sink.write(7, {"loss": 1.0})
    sink.close()
    [(_, _, _, rows)] = recorded(tmp_path)
    assert [row["trainer/global_step"] for row in rows] == [7, 7] and "samples/eval" not in {k for r in rows for k in r}
    [file] = tmp_path.glob("wandb/offline-run-*/files/media/table/samples/train_*.table.json")
    assert (rows[0]["samples/train/_type"], rows[0]["samples/train/nrows"]) == ("table-file", 3)
    table = json.loads(file.read_text())
    shown = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
    assert {row["environment"] for row in shown} == {"shop", "bank"} and len({row["task"] for row in shown}) == 3
    assert [row["reward"] for row in shown if row["environment"] == "shop"] in (
        [1.0, 0.0],
        [0.0, 1.0],
        [0.0, 0.0],
        [1, 1],
    )
    first = next(row for row in shown if row["environment"] == "shop")
    assert first["step"] == 7 and first["outcome"] == "completed" and first["reason"] == "verified"
    assert first["prompt"].startswith("── system\nsss") and first["prompt"].endswith("── user\ndo it")
    assert first["turns"].startswith("── assistant\n<think>hm</think>aaa") and first["turns"].endswith("── tool\nok")
    assert file.stat().st_size < 3 * 20_000, "long texts are cut"


def test_other_steps_show_other_groups():
    collected = groups({f"t{i}": [0.0, 1.0] for i in range(5)})
    assert {t.task_key for step in range(5) for t in choose(collected, 1, step)} == {f"t{i}" for i in range(5)}
    assert {t.reward for t in choose(collected, 4, 0)} == {0.0, 1.0} and choose([], 4, 0) == []


def mlflow_attempt(uri, resumed=None, started=0.0):
    config = {"run": {"seed": 3}, "data": {"tasks": "t" * 7000, "envs": {}}}
    return MlflowSink(uri, "fleet", "mine", config, resumed, started)


@pytest.mark.slow
def test_mlflow_attempts_share_a_tag(tmp_path):
    uri = f"sqlite:///{tmp_path / 'store.db'}"
    first = mlflow_attempt(uri)
    first.write(0, {"eval/all/pass_at_1": 0.25})
    first.write(1, {f"reward/env{i}/pass_at_1": i / 2000 for i in range(2001)} | {"reward/a:b|c/x": float("nan")})
    first.close(complete=False)
    second = mlflow_attempt(uri, resumed=1, started=60.0)
    second.write(2, {"eval/all/pass_at_1": 1})
    second.close()
    client = MlflowClient(uri)
    place = client.get_experiment_by_name("fleet").experiment_id
    runs = sorted(client.search_runs([place], "tags.run = 'mine'"), key=lambda run: run.info.run_name)
    assert [run.info.run_name for run in runs] == ["mine 01-01 00:00:00", "mine 01-01 00:01:00"]
    assert [run.info.status for run in runs] == ["FAILED", "FINISHED"]
    assert runs[0].data.params["run.seed"] == "3" and len(runs[0].data.params["data.tasks"]) == 6000
    assert [run.data.params["attempt.resumed_step"] for run in runs] == ["None", "1"]
    kept = runs[0].data.metrics
    assert len(kept) == 2003 and kept["reward/env2000/pass_at_1"] == 1.0 and np.isnan(kept["reward/a:b_c/x"])
    points = client.get_metric_history(runs[1].info.run_id, "eval/all/pass_at_1")
    assert [(point.step, point.value) for point in points] == [(2, 1.0)]


def test_a_run_goes_on_when_mlflow_does_not(tmp_path, monkeypatch, capsys):
    sink = mlflow_attempt(f"sqlite:///{tmp_path / 'store.db'}")
    answers = threading.Event()

    def log_batch(*_, **__):
        answers.wait(HANG_S)
        raise MlflowException("the server is down")

    monkeypatch.setattr(MlflowClient, "log_batch", log_batch)
    sink.write(1, {"loss": 1.0})
    sink.write(2, {"loss": 0.5})  # returns although the first is not sent
    answers.set()
    sink.close()
    assert "2 batches of metrics did not reach MLflow" in capsys.readouterr().out


def test_a_run_does_not_wait_for_mlflow_for_ever(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(trackers, "FINISH_TIMEOUT_S", 0.2)
    sink = mlflow_attempt(f"sqlite:///{tmp_path / 'store.db'}")
    released = threading.Event()
    monkeypatch.setattr(MlflowClient, "log_batch", lambda *_, **__: released.wait(HANG_S))
    for step in (1, 2, 3):
        sink.write(step, {"loss": 1.0})
    sink.close()
    assert "3 batches of metrics did not reach MLflow" in capsys.readouterr().out
    released.set()


def test_an_mlflow_server_that_refuses_is_one_sentence(tmp_path):
    (tmp_path / "store.db").write_text("no database")
    with pytest.raises(UserError, match=r"logging\.mlflow\.uri=sqlite:.*: MLflow refuses \(.*MLFLOW_TRACKING_TOKEN\.$"):
        mlflow_attempt(f"sqlite:///{tmp_path / 'store.db'}")

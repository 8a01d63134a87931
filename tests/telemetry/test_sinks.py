"""Records on disk: one line per step whatever a crash left behind, and arrays that come back as they were."""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from megatron_fleet.config.errors import UserError
from megatron_fleet.telemetry.sinks import MetricsLog, OwnSink, TensorBoardSink, read_metrics


def steps(path) -> list[int]:
    return [row["step"] for row in read_metrics(path)]


def test_lines_are_there_at_once(tmp_path):
    path = tmp_path / "run" / "metrics.jsonl"
    log = MetricsLog(path, None, started=100.0)
    log.write(0, {"eval/all/pass_at_1": 0.25})
    row = read_metrics(path)[0]  # before close
    assert row["eval/all/pass_at_1"] == 0.25
    assert row["attempt"] == 100.0 and row["time"] > 100.0


def test_resume_drops_what_came_after_the_checkpoint(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path, None)
    for step in range(6):
        log.write(step, {"a": step})
    log.close()
    with path.open("a") as file:
        file.write('{"step": 6, "a"')  # killed in the middle of a line
    log = MetricsLog(path, resumed_step=3)
    log.write(4, {"a": 40})
    log.close()
    assert steps(path) == [0, 1, 2, 3, 4]
    assert [row["a"] for row in read_metrics(path)] == [0, 1, 2, 3, 40]
    MetricsLog(path, None).close()
    assert path.read_text() == ""


GOOD = b'{"step": 1, "a": 1.0}\n'
DAMAGED = {
    "not UTF-8": b'{"step": 1, "a": "\xff"}',
    "not JSON": b'{"step": 1, "a"',
    "has no step": b"null",
    "has no step, a whole number": b'{"a": 1}',
    "has no step, a whole number from 0": b'{"step": "1"}',
    "no step, a whole number from 0;": b'{"step": true}',
    "a is neither a finite number nor null": b'{"step": 1, "a": "1"}',
    "b is neither a finite number nor null": b'{"step": 1, "b": NaN}',
    "c is neither a finite number nor null": b'{"step": 1, "c": 1%s}' % (b"0" * 400),
    "nested more than 200 levels": b'{"step": 1, "a": %s}' % (b"[" * 300 + b"]" * 300),
}


@pytest.mark.parametrize("words", DAMAGED)
def test_a_damaged_line_is_named_with_its_file_when_a_run_is_resumed(tmp_path, words):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(GOOD + DAMAGED[words] + b"\n" + GOOD)
    with pytest.raises(UserError, match="remove the line; the metrics of its step are lost") as caught:
        MetricsLog(path, resumed_step=3)
    assert str(caught.value).startswith(f"{path}, line 2") and words in str(caught.value)
    assert path.read_bytes() == GOOD + DAMAGED[words] + b"\n" + GOOD


@pytest.mark.parametrize("torn", [b'{"step": 2, "a": 0.51.0}\n', b'{"step": 2, "a"', b"\0" * 4096])
def test_a_last_line_that_a_killed_process_left_unfinished_is_left_out(tmp_path, torn, caplog):
    """Also one that it was overwriting with a longer one: its end is that of the shorter line."""
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(GOOD + torn)
    log = MetricsLog(path, resumed_step=3)
    log.write(2, {"a": 2.0})
    log.close()
    assert [(row["step"], row["a"]) for row in read_metrics(path)] == [(1, 1.0), (2, 2.0)]
    message = "line 2: line 1, column 22: not JSON (Expecting ',' delimiter); it is left out"
    assert (message in caplog.text) == torn.endswith(b"\n")


def test_an_evaluation_completes_the_line_of_its_step(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path, None)
    log.write(1, {"loss": 1.0})
    log.write(2, {"loss": 0.5, "long name of a metric": 1 / 3})
    log.write(2, {"eval": 0.9})
    log.write(3, {"loss": 0.1})
    log.close()
    log = MetricsLog(path, resumed_step=3)
    log.write(3, {"eval": 0.95})
    log.write(4, {})
    log.close()
    rows = read_metrics(path)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert (rows[1]["loss"], rows[1]["eval"], rows[2]["loss"], rows[2]["eval"]) == (0.5, 0.9, 0.1, 0.95)
    assert all(json.loads(line) for line in path.read_text().splitlines())


def test_a_completed_line_that_got_shorter_leaves_nothing_behind(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path, None, started=1.0)
    log.write(1, {"loss": 1.0})
    monkeypatch.setattr("time.time", lambda: 2.0)  # a rounder number than the real time before it
    log.write(1, {"a": 1})
    assert path.read_text() == '{"step": 1, "loss": 1.0, "time": 2.0, "attempt": 1.0, "a": 1}\n'


def test_a_step_is_never_written_twice(tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl", None)
    log.write(2, {"a": 1.0})
    with pytest.raises(ValueError, match="step 2 were written before"):
        log.write(2, {"a": 1.0})
    log.write(3, {"a": 1.0})
    with pytest.raises(ValueError, match="step 2 were written before: a"):
        log.write(2, {"a": 1.0, "b": 1.0})


def test_what_comes_later_gets_into_the_line_of_its_step(tmp_path):
    """An evaluation by engines of their own ends some steps later; its step may have no line of its own."""
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path, None, started=1.0)
    for step in (1, 2, 3):
        log.write(step, {"loss": step})
    before = {row["step"]: row["time"] for row in read_metrics(path)}
    log.write(0, {"eval/all/pass_at_1": 0.0})
    log.write(2, {"eval/all/pass_at_1": 0.5})
    log.write(3, {"more": 1.0})
    log.write(4, {"loss": 4})
    log.close()
    rows = read_metrics(path)
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert rows[2] == {"step": 2, "loss": 2, "time": before[2], "attempt": 1.0, "eval/all/pass_at_1": 0.5}
    assert (rows[0]["eval/all/pass_at_1"], rows[3]["more"], rows[4]["loss"]) == (0.0, 1.0, 4)


def test_numbers_json_does_not_have(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path, None)
    log.write(1, {"nan": math.nan, "inf": math.inf, "f32": np.float32(0.5), "count": 3})
    assert "NaN" not in path.read_text() and "Infinity" not in path.read_text()
    row = read_metrics(path)[0]
    assert (row["nan"], row["inf"], row["f32"], row["count"]) == (None, None, 0.5, 3)
    assert read_metrics(tmp_path / "missing.jsonl") == []


def tensorboard_points(folder) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder)).Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_resumes_and_restarts(tmp_path):
    pytest.importorskip("tensorboard")
    sink = TensorBoardSink(tmp_path, None)
    for step in range(5):
        sink.write(step, {"reward/avg_raw_reward": step / 8})
    sink.close()
    sink = TensorBoardSink(tmp_path, resumed_step=2)
    sink.write(3, {"reward/avg_raw_reward": 0.75})
    sink.close()
    assert tensorboard_points(tmp_path) == {"reward/avg_raw_reward": [(0, 0.0), (1, 0.125), (2, 0.25), (3, 0.75)]}
    sink = TensorBoardSink(tmp_path, None)
    sink.write(0, {"other": 1.0})
    sink.close()
    assert tensorboard_points(tmp_path) == {"other": [(0, 1.0)]}


def test_tensorboard_draws_histograms(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = TensorBoardSink(tmp_path, None)
    sink.draw(4, {"distribution/turns": np.array([1.0, 1.0, 5.0]), "distribution/one": np.array([2.0])})
    sink.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    [drawn] = events.Histograms("distribution/turns")
    value = drawn.histogram_value
    assert (drawn.step, value.min, value.max, value.num, value.sum, value.sum_squares) == (4, 1.0, 5.0, 3.0, 7.0, 27.0)
    assert (value.bucket[0], value.bucket[-1], sum(value.bucket), value.bucket_limit[-1]) == (2.0, 1.0, 3.0, 5.0)
    assert events.Histograms("distribution/one")[0].histogram_value.num == 1.0


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Makes a logger of the user's own."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples")
    monkeypatch.syspath_prepend(tmp_path)
    config = SimpleNamespace(run=SimpleNamespace(out=str(tmp_path)))

    def make(path: str, resumed_step: int | None = None) -> OwnSink:
        return OwnSink(path, config, resumed_step, 100.0)

    return make


def test_a_logger_of_ones_own_goes_on_where_a_run_does(own, tmp_path):
    log = own("my_logger:Csv")
    for step in range(1, 5):
        log.write(step, {"policy/grad_norm": step / 4, "other": 1.0})
    log.write(4, {"eval/all/episodes": 8.0})
    log.close()
    log = own("my_logger:Csv", resumed_step=2)
    log.write(3, {"policy/grad_norm": 9.0})
    log.close(complete=False)
    lines = (tmp_path / "metrics.csv").read_text().splitlines()
    assert lines == ["step,reward/avg_pass_at_1,policy/grad_norm", "1,,0.25", "2,,0.5", "3,,9.0"]


def test_a_logger_that_fails_is_left_out_and_said_so_once(own, tmp_path, caplog):
    body = (
        "def __init__(self, *_): pass\n def write(self, step, metrics): metrics['missing']\n def close(self, c): 1 / 0"
    )
    (tmp_path / "failing.py").write_text(f"class Log:\n {body}\n")
    log = own("failing:Log")
    log.write(1, {"a": 1.0})
    log.write(2, {"a": 1.0})
    log.close()
    (message,) = caplog.messages
    assert message.startswith("logging.own=failing:Log: write raises KeyError: 'missing'. It is not called again;")


def test_a_logger_that_cannot_be_made_ends_the_start(own, tmp_path):
    (tmp_path / "unmade.py").write_text("def log(config, resumed_step, started): raise OSError('no disk')\n")
    with pytest.raises(UserError, match=r"^logging\.own=unmade:log raises OSError: no disk; correct it\.$"):
        own("unmade:log")

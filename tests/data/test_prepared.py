"""Prepared folders: every field comes back, half of one is none, and they split a run as they were split."""

import dataclasses
import hashlib
import json
import shutil
import subprocess
import sys

import pytest

pytest.importorskip("pyarrow")

from pyarrow import parquet
from waiting import HANG_S

from megatron_fleet.config.errors import UserError
from megatron_fleet.config.sections.data import DataConfig
from megatron_fleet.data import source
from megatron_fleet.data.dataset import build, load_tasks
from megatron_fleet.data.split import SplitManifest
from megatron_fleet.data.task import Task

FULL = Task(
    *("k1", "Do é.\n", "github", "def v(env): return 1", "v1", "seed", "v2"),
    env_variables={"CURRENT_DATE": "2026-03-10", "n": [1, None, {"x": 0.5}]},
    modality="computer_use",
    difficulty=3,
    answer={"total": [1, "x"]},
)
BARE = Task("k2", "p", "jira", "v")
MANIFEST = SplitManifest("t", "ab", {}, ["k2"], ["k1"], [])


@pytest.fixture
def tasks_file(tmp_path):
    def row(env, i):
        return {"key": f"{env}_{i}", "prompt": f"Do {i}.", "env_id": env, "verifier_func": "v"}

    def write(counts):
        file = tmp_path / "tasks.json"
        file.write_text(json.dumps([row(env, i) for env, count in counts.items() for i in range(count)]))
        return str(file)

    return write


def make(out, data, previous=None):
    made = build(data, previous)
    return made, source.write_prepared(out, made.split.train, made.split.held_out, made.manifest)


def test_every_field_comes_back(tmp_path):
    assert all(getattr(FULL, f.name) != f.default for f in dataclasses.fields(Task)), "give the new field a value here"
    source.write_prepared(tmp_path / "p", [FULL], [BARE], MANIFEST)
    assert load_tasks(tmp_path / "p") == [FULL, BARE]


COUNT_THREADS = """
import os, sys
import pyarrow.parquet
from megatron_fleet.data.dataset import load_tasks
before = len(os.listdir("/proc/self/task"))
assert len(load_tasks(sys.argv[1])) == 400
print(len(os.listdir("/proc/self/task")) - before)
"""


def test_reading_leaves_no_threads_that_could_abort_the_end_of_the_process(tmp_path):
    tasks = [dataclasses.replace(BARE, key=f"t{i}") for i in range(400)]
    source.write_prepared(tmp_path / "p", tasks[:200], tasks[200:], MANIFEST)
    command = (sys.executable, "-c", COUNT_THREADS, str(tmp_path / "p"))
    assert subprocess.run(command, capture_output=True, text=True, check=True, timeout=HANG_S).stdout == "0\n"


def test_fleets_columns_come_first(tmp_path):
    source.write_prepared(tmp_path / "p", [FULL], [BARE], MANIFEST)
    table = parquet.read_table(tmp_path / "p" / "train.parquet")
    assert table.column_names[:4] == ["prompt", "env_class", "task_key", "data_source"]
    (row,) = table.to_pylist()
    assert row["prompt"] == [{"role": "user", "content": FULL.prompt}]
    assert (row["env_class"], row["task_key"], row["data_source"]) == ("fleet_task", "k1", "github")
    assert sorted(path.name for path in (tmp_path / "p").iterdir()) == ["eval.parquet", "split.json", "train.parquet"]


def test_the_same_content_again_changes_nothing_and_another_is_refused(tmp_path, tasks_file):
    data = DataConfig(tasks=tasks_file({"a": 50, "b": 30}))
    _, written = make(tmp_path / "p", data)
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in (tmp_path / "p").iterdir()}
    assert written and not make(tmp_path / "p", data)[1]
    with pytest.raises(UserError, match="another prepared folder"):
        make(tmp_path / "p", data.model_copy(update={"eval_fraction": 0.5}))
    assert {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in (tmp_path / "p").iterdir()} == before
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").write_text("x")
    with pytest.raises(UserError, match="something else is at this path"):
        make(tmp_path / "mine", data)


def test_a_failed_write_leaves_no_folder_and_the_next_one_works(tmp_path, tasks_file, monkeypatch):
    data = DataConfig(tasks=tasks_file({"a": 50}))
    original = source._to_parquet
    calls = []

    def fail_second(tasks):
        calls.append(tasks)
        return original(tasks) if len(calls) != 2 else 1 / 0

    monkeypatch.setattr(source, "_to_parquet", fail_second)
    with pytest.raises(ZeroDivisionError):
        make(tmp_path / "p", data)
    assert not (tmp_path / "p").exists()
    (tmp_path / ".p.partial").mkdir()
    (tmp_path / ".p.partial" / "train.parquet").write_bytes(b"half")
    assert make(tmp_path / "p", data)[1]
    assert len(load_tasks(tmp_path / "p")) == 50


@pytest.mark.parametrize("name", ["train.parquet", "eval.parquet", "split.json"])
def test_a_damaged_folder_is_refused(tmp_path, name):
    source.write_prepared(tmp_path / "p", [FULL], [BARE], MANIFEST)
    file = tmp_path / "p" / name
    content = file.read_bytes()
    file.write_bytes(content[:-2])
    with pytest.raises(UserError, match=name):
        load_tasks(tmp_path / "p")
    file.unlink()
    with pytest.raises(UserError, match=f"{name} is missing"):
        load_tasks(tmp_path / "p")


@pytest.mark.parametrize("content", [b"", b"PAR1", None])
def test_a_table_that_cannot_be_read_is_refused(tmp_path, content):
    """Though it is the one that the manifest names."""
    source.write_prepared(tmp_path / "p", [FULL], [BARE], MANIFEST)
    file, manifest = tmp_path / "p" / "train.parquet", tmp_path / "p" / "split.json"
    before = file.read_bytes()
    file.write_bytes(before[: len(before) // 2] if content is None else content)
    named = [hashlib.sha256(data).hexdigest() for data in (before, file.read_bytes())]
    manifest.write_text(manifest.read_text().replace(*named))
    with pytest.raises(UserError, match=r"train\.parquet: no table of tasks"):
        load_tasks(tmp_path / "p")


def test_a_run_on_a_prepared_folder_has_its_split(tmp_path, tasks_file):
    data = DataConfig(tasks=tasks_file({"a": 300, "b": 100}), eval_fraction=0.4, max_eval=30, max_eval_per_env=20)
    made, _ = make(tmp_path / "p", data)
    default = build(DataConfig(tasks=str(tmp_path / "p")))
    assert {t.key for t in default.split.train} == {t.key for t in made.split.train}
    assert {t.key for t in default.split.held_out} == {t.key for t in made.split.held_out}
    only_b = build(DataConfig(tasks=str(tmp_path / "p"), environments=("b",))).split
    assert {t.key for t in only_b.held_out} == {t.key for t in made.split.held_out if t.env_key == "b"}
    with pytest.raises(UserError, match=r"remove data\.split_manifest"):
        build(DataConfig(tasks=str(tmp_path / "p"), split_manifest=str(tmp_path / "p" / "split.json")))


def test_a_later_version_keeps_the_sides_of_an_earlier_one(tmp_path, tasks_file):
    limits = {"max_eval_per_env": 10, "max_eval": 12}
    first, _ = make(tmp_path / "v1", DataConfig(tasks=tasks_file({"a": 100, "b": 40}), **limits))
    source = tasks_file({"a": 500, "c": 100})
    second, _ = make(
        tmp_path / "v2", DataConfig(tasks=source, split_manifest=str(tmp_path / "v1" / "split.json"), **limits)
    )
    old = {t.key for t in first.split.held_out}
    assert {t.key for t in second.split.held_out} >= {key for key in old if key.startswith("a")}
    assert not old & {t.key for t in second.split.train}
    # Environment b is gone, and yet its sides are not forgotten.
    assert {key for key in second.manifest.eval if key.startswith("b")} == {key for key in old if key.startswith("b")}
    shutil.rmtree(tmp_path / "v1")
    third, _ = make(
        tmp_path / "v3",
        DataConfig(tasks=tasks_file({"b": 60, "a": 9}), split_manifest=str(tmp_path / "v2" / "split.json"), **limits),
    )
    assert {t.key for t in third.split.held_out} >= {key for key in old if key.startswith("b")}


def test_a_manifest_of_other_data_is_refused(tmp_path, tasks_file):
    make(tmp_path / "p", DataConfig(tasks=tasks_file({"a": 20})))
    with pytest.raises(UserError, match="has none of its tasks"):
        build(DataConfig(tasks=tasks_file({"b": 20}), split_manifest=str(tmp_path / "p" / "split.json")))
    with pytest.raises(UserError, match=r"cannot be read .*; correct data\.split_manifest"):
        build(DataConfig(tasks=tasks_file({"b": 20}), split_manifest=str(tmp_path / "nowhere.json")))

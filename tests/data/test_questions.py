"""Tables of questions become task files: columns, keys, splits, and the hub's Parquet copy."""

from __future__ import annotations

import io
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

pytest.importorskip("pyarrow")

import pyarrow as pa
from pyarrow import parquet

from megatron_fleet.cli import main
from megatron_fleet.config.errors import UserError
from megatron_fleet.data.dataset import load_tasks
from megatron_fleet.data.questions import environment_of, make_rows, read_table

ROWS = [{"question": f"What is {i} + 1?", "label": {"value": i + 1}, "id": i} for i in range(5)]


def table(rows=ROWS) -> bytes:
    out = io.BytesIO()
    parquet.write_table(pa.Table.from_pylist(rows), out)
    return out.getvalue()


def make(rows, **columns):
    return make_rows(
        rows, "t.jsonl", "sums", **({"prompt": "question", "answer": "label.value", "key": None} | columns)
    )


def test_the_command_writes_a_task_file(tmp_path, capsys):
    (tmp_path / "sums.v1.jsonl").write_text("\n".join(map(json.dumps, [*ROWS, ROWS[0]])))
    out = tmp_path / "new" / "tasks.json"
    command = ["data", "from", str(tmp_path / "sums.v1.jsonl"), "--prompt", "question", "--answer", "label.value"]
    for _ in range(2):  # again with the same content, it changes nothing
        assert main([*command, "--out", str(out)]) == 0
    assert f"{out}: 5 tasks of environment sums.v1, 1 repeated rows left out" in capsys.readouterr().out
    tasks = load_tasks(out)
    assert [(task.prompt, task.answer, task.env_key) for task in tasks] == [
        (row["question"], row["label"]["value"], "sums.v1") for row in ROWS
    ]
    assert all(not task.env_variables for task in tasks)
    assert main([*command, "--key", "id", "--out", str(out)]) != 0
    assert "another file is there already" in capsys.readouterr().err


def test_keys_depend_on_the_row_alone():
    keys = [row["task_key"] for row in make(ROWS)]
    assert len(set(keys)) == 5 and all(re.fullmatch("sums-[0-9a-f]{16}", key) for key in keys)
    assert [row["task_key"] for row in make(ROWS[::-1])] == keys[::-1]
    assert keys[0] not in [row["task_key"] for row in make([ROWS[0] | {"label": {"value": 9}}])]
    assert [row["task_key"] for row in make(ROWS, key="id")] == ["0", "1", "2", "3", "4"]


@pytest.mark.parametrize(
    ("change", "columns", "words"),
    [
        ({}, {"prompt": "query"}, "row 1 has no column query; it has question, label, id"),
        ({}, {"answer": "label.text"}, "row 1 has no column label.text"),
        ({"question": None}, {}, "row 5 has nothing in column question"),
        ({"label": {"value": ""}}, {}, "row 5 has nothing in column label.value"),
        ({"id": 0}, {"key": "id"}, "row 5: another row has the id '0'; leave --key out"),
        (
            {"question": [{"role": "system", "content": "s"}] * 2},
            {},
            "task 5 .*prompt: expected text, or a list",
        ),
    ],
)
def test_a_table_that_gives_no_tasks_is_refused_with_its_row(change, columns, words):
    with pytest.raises(UserError, match=f"^t.jsonl: {words}"):
        make([*ROWS[:4], ROWS[4] | change], **columns)


@pytest.mark.parametrize(
    ("files", "split", "subset", "rows"),
    [
        (
            ["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet", "data/test-0.parquet"],
            "train",
            None,
            10,
        ),
        (["data/train-0.parquet", "data/test-0.parquet"], "test", None, 5),
        (["data-00000-of-00001.parquet", "dataset_info.json", "README.md"], "train", None, 5),
        (["main/train/0.parquet", "socratic/train/0.parquet"], "train", "main", 5),
    ],
)
def test_a_folder_is_read_by_split(tmp_path, files, split, subset, rows):
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(table() if name.endswith(".parquet") else b"{}")
    assert len(read_table(str(tmp_path), split, subset)) == rows


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (["data/test-0.parquet"], "no file of split train; there is data/test-0.parquet"),
        (["notes.txt"], "no file of split train; there is no file of a known format"),
        (["a/train.parquet", "b/train.parquet"], r"in several folders \(a, b\); choose one with --subset"),
    ],
)
def test_a_folder_without_the_split_is_refused(tmp_path, files, words):
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(table())
    with pytest.raises(UserError, match=words):
        read_table(str(tmp_path), "train")


HUB_FILES = {"main/train/0000.parquet": table(), "main/test/0000.parquet": table(ROWS[:1])}


class Hub(BaseHTTPRequestHandler):
    """The part of the hub's API by which huggingface_hub lists and downloads the files of a dataset."""

    def log_message(self, *_):
        pass

    def do_GET(self):
        path = self.path.split("?")[0].replace("%2F", "/")
        if path.startswith("/api/datasets/org/sums"):
            revision = path.removeprefix("/api/datasets/org/sums/tree/").rstrip("/")
            if revision != "refs/convert/parquet":
                return self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
            tree = [{"type": "file", "path": name, "size": len(d), "oid": "0"} for name, d in HUB_FILES.items()]
            return self._send(200, json.dumps(tree).encode(), {"Content-Type": "application/json"})
        name = path.removeprefix("/datasets/org/sums/resolve/refs/convert/parquet/")
        if name not in HUB_FILES:
            return self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        return self._send(200, HUB_FILES[name], {"X-Repo-Commit": "5f" * 20, "ETag": f'"{len(name)}"'})

    do_HEAD = do_GET

    def _send(self, status, body, headers):
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


def test_a_dataset_on_the_hub_is_read_as_its_parquet_copy(tmp_path, monkeypatch):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HUB_OFFLINE", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    try:
        assert read_table("org/sums", "train") == ROWS
        assert read_table("org/sums", "test") == ROWS[:1]
        with pytest.raises(UserError, match="no file of split valid"):
            read_table("org/sums", "valid")
        with pytest.raises(UserError, match="org/other: there is no such file here, and no such dataset on the hub"):
            read_table("org/other", "train")
        with pytest.raises(UserError, match="org/sums@v9: the dataset has no such revision"):
            read_table("org/sums@v9", "train")
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    ("source", "name"),
    [("data/gsm.v2.jsonl", "gsm.v2"), ("openai/gsm8k@main", "gsm8k"), ("s3://b/x/q.parquet", "q"), ("a:b.csv", "a_b")],
)
def test_the_environment_is_named_as_the_source(source, name):
    assert environment_of(source) == name

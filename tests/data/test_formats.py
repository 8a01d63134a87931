"""Task files of every format give the same rows; what is not read is refused by its name."""

import csv
import gzip
import io
import json

import pytest

pytest.importorskip("pyarrow")

import pyarrow as pa
from pyarrow import parquet

from megatron_fleet.config.errors import UserError
from megatron_fleet.data.dataset import load_tasks
from megatron_fleet.data.formats import read_rows
from megatron_fleet.data.task import Task

ROWS = [
    {"task_key": "a", "prompt": 'Say "hé",\nthen stop.', "env_key": "desk", "answer": "1"},
    {"task_key": "b", "prompt": "Do; it", "env_key": "desk:v2", "answer": "x\ty"},
]
TASKS = [Task("a", 'Say "hé",\nthen stop.', "desk", answer="1")]
TASKS += [Task("b", "Do; it", "desk", env_version="v2", answer="x\ty")]


def as_csv(delimiter: str = ",") -> bytes:
    out = io.StringIO()
    writer = csv.DictWriter(out, ROWS[0], delimiter=delimiter)
    writer.writeheader()
    writer.writerows(ROWS)
    return out.getvalue().encode()


def as_lines() -> bytes:
    return b"\n".join(json.dumps(row, ensure_ascii=False).encode() for row in ROWS)


def as_parquet(rows=ROWS) -> bytes:
    out = io.BytesIO()
    parquet.write_table(pa.Table.from_pylist(rows), out)
    return out.getvalue()


def as_arrow(new) -> bytes:
    table, out = pa.Table.from_pylist(ROWS), io.BytesIO()
    with new(out, table.schema) as writer:
        writer.write_table(table)
    return out.getvalue()


BOM = b"\xef\xbb\xbf"
FORMS = {
    "list.json": json.dumps(ROWS).encode(),
    "bom.json": BOM + json.dumps({"tasks": ROWS}).encode(),
    "lines.jsonl": as_lines() + b"\n\n",
    "lines.json": as_lines(),
    "windows.jsonl": BOM + as_lines().replace(b"\n{", b"\r\n{") + b"\r\n",
    "table.csv": as_csv(),
    "excel.csv": BOM + as_csv(";"),
    "table.tsv": as_csv("\t"),
    "table.parquet": as_parquet(),
    "parquet_without_its_suffix": as_parquet(),
    "file.arrow": as_arrow(pa.ipc.new_file),
    "stream.arrow": as_arrow(pa.ipc.new_stream),
}


@pytest.mark.parametrize("name", FORMS)
def test_every_format_gives_the_same_tasks(tmp_path, name):
    (tmp_path / name).write_bytes(FORMS[name])
    assert load_tasks(tmp_path / name) == TASKS


def test_one_line_is_a_task_if_the_name_says_lines():
    row = json.dumps(ROWS[0]).encode()
    assert read_rows(row, "one.jsonl") == ROWS[:1]
    with pytest.raises(UserError, match="expected a list of tasks"):
        read_rows(row, "one.json")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (gzip.compress(b"[]", mtime=0), "compressed with gzip; unpack it"),
        (b"PK\x03\x04rest", "zip archive, as Excel's files are"),
        (b"\xff\xfe[\x00", "UTF-16 text; save it as UTF-8"),
        (b"version https://git-lfs.github.com/spec/v1\noid", "git lfs pull"),
        (b"SQLite format 3\0", "an SQLite database"),
        (b"\x80\x04\x95", "a Python pickle"),
        (b"<!DOCTYPE html><html>", "a web page"),
        (b"PAR1 and no more", "no table of tasks"),
        (b"ARROW1 and no more", "no table of tasks"),
        (b"", "holds no task|not JSON"),
        (BOM, "not JSON"),
        (b'{"a": 1}\n{"b": }\n{"c": 2}', "line 2, column 7: not JSON"),
        (b'{"a": 1}\n{"b": "\xff"}', "byte 16: not UTF-8"),
    ],
)
def test_what_cannot_be_read_is_refused_by_its_name(data, words):
    with pytest.raises(UserError, match=f"^given:? .*({words})") as refused:
        read_rows(data, "given")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a,b\n1\n", "ends in line 2 has 1 cells, and the first line names 2"),
        ("a,a\n1,2\n", "two columns are named 'a'"),
        ('a,b\n"1,2\n3,4\n', "line 3: not CSV"),
        ("a,b\n", "holds no task"),
        ("", "holds no task"),
    ],
)
def test_damaged_csv_is_refused_with_its_place(text, words):
    with pytest.raises(UserError, match=f"^t.csv:? .*{words}"):
        read_rows(text.encode(), "t.csv")


def test_a_struct_has_the_keys_of_its_row_alone(tmp_path):
    """A struct column has all keys in every row: a variable that is not there would be shown as None."""
    rows = [ROWS[0] | {"env_variables": {"USER": "ann"}}, ROWS[1] | {"env_variables": {"DAY": "monday"}}]
    (tmp_path / "t.parquet").write_bytes(as_parquet(rows))
    assert [task.env_variables for task in load_tasks(tmp_path / "t.parquet")] == [{"USER": "ann"}, {"DAY": "monday"}]


def test_a_null_in_a_table_is_a_missing_value(tmp_path):
    (tmp_path / "t.parquet").write_bytes(as_parquet([*ROWS, ROWS[0] | {"task_key": "c", "prompt": None}]))
    with pytest.raises(UserError, match=r"task 3 \(c\): prompt: expected text, found nothing, it is missing\. Correct"):
        load_tasks(tmp_path / "t.parquet")

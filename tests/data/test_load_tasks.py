"""Task files: every spelling is read, every fault is named with file, row, field and expectation."""

import hashlib
import json
import re
from pathlib import Path

import pytest

from megatron_fleet.config.errors import UserError
from megatron_fleet.data.dataset import load_tasks
from megatron_fleet.data.rows import ALIASES
from megatron_fleet.data.source import read_source

ROW = {"task_key": "t1", "prompt": "Do it.", "env_key": "github", "verifier_code": "def verify(env): return 1"}


@pytest.fixture
def write(tmp_path):
    def _write(content):
        path = tmp_path / "tasks.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
        return path

    return _write


def test_current_and_old_spellings_give_the_same_task(write):
    current = {
        **ROW,
        "env_version": "v1",
        "data_key": "seed",
        "data_version": "v2",
        "env_variables": {"CURRENT_DATE": "2026-03-10"},
        "task_modality": "computer_use",
        "difficulty": 2,
    }
    old = {
        "key": "t1",
        "prompt": "Do it.",
        "env_id": "github",
        "verifier_func": ROW["verifier_code"],
        "version": "v1",
        "data_id": "seed",
        "data_version": "v2",
        "env_variables": {"CURRENT_DATE": "2026-03-10"},
        "task_modality": "computer_use",
        "difficulty": 2,
        "team_id": "ignored",
    }
    (a,) = load_tasks(write([current]))
    (b,) = load_tasks(write({"tasks": [old]}))
    assert a == b
    assert (a.env_key, a.env_version, a.data_key, a.data_version, a.difficulty) == ("github", "v1", "seed", "v2", 2)
    wallst = {k: v for k, v in old.items() if k not in ("data_id", "data_version")}
    (c,) = load_tasks(write([{**wallst, "env_data_key": "seed", "env_data_version": "v2"}]))
    assert c == a


def test_the_reference_has_every_field_and_name():
    page = (Path(__file__).parents[2] / "docs" / "reference" / "data.md").read_text(encoding="utf-8")
    rows = [",".join(line.split("|")[1:3]) for line in page.splitlines() if line.startswith("| `")]
    named = [re.findall("`(.*?)`", row) for row in rows]
    assert [names for names in ALIASES.values() if list(names) not in named] == []


def test_null_means_not_given(write):
    (task,) = load_tasks(write([{**ROW, "difficulty": None, "env_variables": None, "data_key": None, "key": None}]))
    assert task.difficulty is None
    assert task.env_variables == {}
    assert task.modality == "tool_use"


def test_empty_text_means_the_default_where_there_is_one(write):
    empty = dict.fromkeys(("env_version", "data_key", "env_data_key", "data_version", "verifier_func"), "")
    plain = {key: value for key, value in ROW.items() if key != "verifier_code"}
    (task,) = load_tasks(write([plain | empty]))
    assert (task.env_version, task.data_key, task.data_version, task.verifier_code) == (None, None, None, "")
    (task,) = load_tasks(write([ROW | empty | {"data_id": "seed"}]))
    assert (task.data_key, task.verifier_code) == ("seed", ROW["verifier_code"])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"env_key": "all"}, ["task 2", "env_key", "another name", '"all"']),
        ({"env_key": "aggregated_results"}, ["task 2", "env_key", "another name"]),
        ({"env_key": ".."}, ["task 2", "env_key", "not only dots", '".."']),
        ({"env_key": "x" * 61}, ["task 2", "env_key", "at most 60 characters"]),
        ({"env_key": "a\nb"}, ["task 2", "env_key", "without control characters", '"a\\nb"']),
        ({"data_key": "a\0b"}, ["task 2", "data_key", "without control characters"]),
        ({"task_key": "k" * 1001}, ["task 2", "task_key", "at most 1000 characters", "kkk..."]),
        ({"task_key": None}, ["task 2", "task_key", "missing", "key"]),
        ({"prompt": ""}, ["task 2", "prompt", "not empty"]),
        ({"prompt": " \n"}, ["task 2", "prompt", "not empty"]),
        ({"prompt": 7}, ["task 2", "prompt", "text", "a number 7"]),
        ({"verifier_code": 3}, ["task 2", "verifier_code", "expected text"]),
        ({"env_key": None}, ["task 2", "env_key", "missing", "env_id"]),
        ({"env_variables": ["A"]}, ["task 2", "env_variables", "an object", "a list"]),
        ({"difficulty": 4}, ["task 2", "difficulty", "1, 2 or 3", "4"]),
        ({"difficulty": True}, ["task 2", "difficulty", "truth value"]),
        ({"difficulty": "hard"}, ["task 2", "difficulty", 'text "hard"']),
        ({"difficulty": 2.5}, ["task 2", "difficulty", "a number 2.5"]),
        ({"env_variables": "A=1"}, ["task 2", "env_variables", "an object, or its JSON text", '"A=1"']),
        ({"env_variables": "[1]"}, ["task 2", "env_variables", "a list"]),
        ({"prompt": [{"role": "system", "content": "s"}]}, ["task 2", "prompt", "one message of the user", "a list"]),
        ({"env_key": "github:v1:v2"}, ["task 2", "env_key after the colon", "without a colon", '"v1:v2"']),
        ({"env_key": ":v1"}, ["task 2", "env_key", "not empty"]),
        ({"env_key": "github:v1", "version": "v2"}, ["task 2", "version", "env_key after the colon", '"v1"', '"v2"']),
        ({"env_id": "jira:v1"}, ["task 2", "env_id", '"github"', '"jira"']),
        ({"task_modality": "voice"}, ["task 2", "task_modality", "tool_use", "voice"]),
        ({"task_modality": {}}, ["task 2", "task_modality", "an object"]),
        ({"env_id": "jira"}, ["task 2", "env_id", "the value of env_key", '"github"', '"jira"']),
        ({"task_key": "t1"}, ["task 2", "'t1'", "task 1", "data.duplicates=first"]),
    ],
)
def test_bad_rows_are_refused_with_their_place(write, change, words):
    path = write([ROW, {**ROW, "task_key": "t2", **change}])
    with pytest.raises(UserError) as refused:
        load_tasks(path)
    for word in (str(path), *words):
        assert word in str(refused.value)
    assert "\n" not in str(refused.value)


def test_environments_that_would_share_metrics_and_files_are_refused(write):
    path = write([{**ROW, "env_key": "git/hub"}, {**ROW, "task_key": "t2", "env_key": "git_hub"}])
    with pytest.raises(
        UserError, match=r'task 2 \(t2\): env_key: expected "git/hub" or another name.*call both git_hub'
    ):
        load_tasks(path)


def test_the_number_of_further_problems_is_told(write):
    path = write([{**ROW, "prompt": 7, "difficulty": 9}, {"key": "b"}])
    with pytest.raises(
        UserError, match=r"task 1 \(t1\): prompt.*There are 3 more kinds of problems.*mfleet data inspect"
    ):
        load_tasks(path)


def test_rows_with_the_same_problem_are_one_sentence(write):
    path = write([{name: value for name, value in ROW.items() if name != "task_key"}] * 60)
    with pytest.raises(UserError) as refused:
        load_tasks(path)
    assert str(refused.value) == (
        f"{path}: task 1: task_key: expected text (also accepted: key), found nothing, it is missing. The same in 59 "
        f"more tasks: 2, 3, 4, 5, 6, …. `mfleet data from FILE` makes them."
    )


@pytest.mark.parametrize(
    ("change", "version"),
    [
        ({"env_key": "github:v1"}, "v1"),
        ({"env_key": None, "env_id": "github:v1", "version": "v1"}, "v1"),
        ({"env_id": "github:v1"}, "v1"),
        ({"env_id": "github:None", "version": "v1"}, "v1"),
        ({"version": "None"}, None),
        ({"env_key": "github:"}, None),
    ],
)
def test_versions_as_exports_write_them(write, change, version):
    (task,) = load_tasks(write([ROW | change]))
    assert (task.env_key, task.env_version) == ("github", version)


@pytest.mark.parametrize("nothing", ["", "None", "null"])
def test_json_text_in_fields_is_read(write, nothing):
    texts = {"env_variables": '{"CURRENT_DATE": "2026-03-10"}', "difficulty": "2"}
    (task,) = load_tasks(write([ROW | texts]))
    assert (task.env_variables, task.difficulty) == ({"CURRENT_DATE": "2026-03-10"}, 2)
    (task,) = load_tasks(write([ROW | dict.fromkeys(texts, nothing)]))
    assert (task.env_variables, task.difficulty) == ({}, None)
    (task,) = load_tasks(write([ROW | {"prompt": [{"role": "user", "content": "Go."}], "difficulty": 3.0}]))
    assert (task.prompt, task.difficulty) == ("Go.", 3)


def test_the_answer_keeps_its_type_and_is_in_no_repr(write):
    answers = ["7", 7, ["a", "b"], {"x": 1}, "None", None]
    tasks = load_tasks(write([ROW | {"task_key": f"t{i}", "answer": answer} for i, answer in enumerate(answers)]))
    assert [task.answer for task in tasks] == answers
    assert "answer" not in repr(tasks[0])


def test_both_spellings_with_one_value_are_fine(write):
    (task,) = load_tasks(write([{**ROW, "key": "t1"}]))
    assert task.key == "t1"


@pytest.mark.parametrize(
    ("content", "word"),
    [
        ('[\n{"task_key": "a",\n]', "line 3"),
        ("{}", "list"),
        ('{"tasks": {"a": 1}}', "list"),
        ("[]", "no task"),
        ('"tasks"', "list"),
        ("[3]", "task 1: expected an object"),
        ("[" * 100000, "JSON"),
        ('[{"difficulty": ' + "9" * 5000 + "}]", "JSON"),
    ],
)
def test_bad_files_are_refused(write, content, word):
    with pytest.raises(UserError, match=word):
        load_tasks(write(content))


def test_unreadable_files_are_refused(tmp_path):
    with pytest.raises(UserError, match="nowhere"):
        load_tasks(tmp_path / "nowhere.json")
    binary = tmp_path / "tasks.json"
    binary.write_bytes(b'["\xff"]')
    with pytest.raises(UserError, match="UTF-8"):
        load_tasks(binary)


def test_the_hash_is_of_the_bytes(write):
    path = write([ROW])
    assert read_source(path).sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    before = read_source(path).sha256
    write([ROW, {**ROW, "task_key": "t2"}])
    assert read_source(path).sha256 != before


def test_embedded_names_the_shipped_file():
    tasks = load_tasks("embedded")
    assert {t.env_key for t in tasks} == {"tickets", "booking", "ledger"}
    assert len(read_source("embedded").sha256) == 64

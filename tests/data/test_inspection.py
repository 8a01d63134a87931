"""The report on a task file has every problem of every row, and the rest is looked at all the same."""

import json

import pytest

from megatron_fleet.config.errors import UserError
from megatron_fleet.config.sections.data import DataConfig
from megatron_fleet.data.dataset import build
from megatron_fleet.data.inspection import as_json, describe, inspect
from megatron_fleet.data.split import key_hash

ROW = {"prompt": "Do it now, please.", "env_key": "github", "verifier_code": "v"}


@pytest.fixture
def report(tmp_path):
    def make(rows, **keys):
        file = tmp_path / "t.json"
        file.write_text(json.dumps(rows))
        found = inspect(DataConfig(tasks=str(file), **keys))
        return as_json(found), describe(found)

    return make


def test_all_problems_of_all_rows_are_told(report):
    rows = [
        {**ROW, "key": "a"},
        7,
        {**ROW, "key": "b", "prompt": "", "difficulty": 4, "env_id": "jira"},
        {"key": "c", "task_modality": "voice"},
        {**ROW, "key": "a", "env_key": "jira"},
        {**ROW, "key": 5},
    ]
    found, text = report(rows)
    problems = [(p["row"], p["key"], p["field"], p["kind"]) for p in found["problems"]]
    assert problems == [
        (2, None, "", "not an object"),
        (3, "b", "prompt", "wrong value"),
        (3, "b", "env_id", "conflict"),
        (3, "b", "difficulty", "wrong value"),
        (4, "c", "prompt", "missing"),
        (4, "c", "env_key", "missing"),
        (4, "c", "task_modality", "wrong value"),
        (5, "a", "task_key", "duplicate key"),
        (6, None, "key", "wrong value"),
    ]
    assert found["problem_kinds"] == {
        "conflict": 1,
        "duplicate key": 1,
        "missing": 2,
        "not an object": 1,
        "wrong value": 4,
    }
    assert (found["rows"], found["tasks"], found["repeated_keys"]) == (6, 1, {"jira": 1})
    assert "task 3 (b): difficulty: expected 1, 2 or 3, found a number 4." in text
    assert report(rows, duplicates="first")[0]["problem_kinds"] == {"conflict": 1, "missing": 2} | {
        "not an object": 1,
        "wrong value": 4,
    }


def test_a_malformed_row_that_is_excluded_stops_nobody(tmp_path):
    rows = [{**ROW, "key": f"t{i}"} for i in range(20)] + [{**ROW, "key": "bad", "prompt": ""}, {**ROW, "prompt": 1}]
    file, exclusion = tmp_path / "t.json", tmp_path / "bad.yaml"
    file.write_text(json.dumps(rows[:-1]))
    exclusion.write_text("reason: it has no prompt\ntasks: [bad]\n")
    data = DataConfig(tasks=str(file), exclusions=(str(exclusion),))
    assert inspect(data).problems == []
    assert len(build(data).split.train) + len(build(data).split.held_out) == 20
    with pytest.raises(UserError, match=r"task 21 \(bad\): prompt.*name it in a list of data\.exclusions"):
        build(DataConfig(tasks=str(file)))
    file.write_text(json.dumps(rows))  # a row without a key cannot be named
    with pytest.raises(UserError, match=r"task 22: task_key: .* it is missing\..* There is 1 more kind of problem;"):
        build(data)
    assert [problem.row for problem in inspect(data).problems] == [22, 22]


def test_a_file_without_one_good_row_is_reported(report):
    found, text = report([{"key": "a"}, 3])
    assert (found["tasks"], found["environments"], found["near_duplicates"]) == (0, {}, [])
    assert "problems: missing 2, not an object 1" in text


def test_what_is_in_the_file(report):
    rows = [
        {**ROW, "key": "a", "prompt": "x" * 10, "team": 1, "env_version": "v1", "data_id": "d", "difficulty": 2},
        {**ROW, "key": "b", "prompt": "y z " * 10, "team": 2, "env_variables": {"CURRENT_DATE": "2026-01-01"}},
        {
            **ROW,
            "key": "c",
            "prompt": "w" * 20,
            "verifier_code": None,
            "env_version": "v1",
            "data_id": "d",
            "task_modality": "computer_use",
        },
    ]
    found, text = report(rows)
    assert found["unknown_fields"] == {"team": 2}
    assert found["prompt_characters"] == {"least": 10, "half": 20, "95_percent": 40, "most": 40}
    assert found["without_current_date"] == 2
    assert found["without_verifier"] == 1
    assert found["modalities"] == {"computer_use": 1, "tool_use": 2}
    assert found["difficulties"] == {"2": 1, "not given": 2}
    assert [(r["version"], r["data_key"], r["tasks"]) for r in found["versions"]] == [(None, None, 1), ("v1", "d", 2)]
    assert "github:v1, data d:default: 2" in text and "unknown fields: team 2" in text


def test_versions_that_are_all_different_are_counted(report):
    rows = [{**ROW, "key": f"{n}", "prompt": f"p{n}", "data_id": f"d{n}"} for n in range(5)]
    found, text = report(rows)
    assert len(found["versions"]) == 5
    assert "versions:\n  github: each of 5 tasks has its own version or data\n" in text
    assert "github:default, data d3:default: 1" in report(rows[:4])[1]


def test_what_the_keys_of_the_configuration_make_of_it(report):
    rows = [{**ROW, "key": f"{env}{i}", "env_key": env} for env in ("github", "dropbox") for i in range(100)]
    rows += [rows[0]]
    keys = {"duplicates": "first", "exclusions": ("dropbox",), "max_tasks": 60, "max_eval_per_env": 5}
    found, text = report(rows, **keys)
    table = found["environments"]
    names = ["total", "duplicate key", "dropbox", "max_tasks", "train", "eval", "eval_share", "mix"]
    assert list(table["github"]) == names
    assert list(table["dropbox"].values()) == [100, 0, 100, 0, 0, 0, 0, 0]
    assert list(table["github"].values()) == [101, 1, 0, 40, 55, 5, pytest.approx(5 / 60), 1]
    assert table["all"]["total"] == 201
    assert "duplicate key" in text and "max tasks" in text


def test_the_mix_is_of_all_training_tasks(report):
    rows = [{**ROW, "key": f"{env}{i}", "env_key": env} for env, n in (("a", 90), ("b", 30)) for i in range(n)]
    table = report(rows)[0]["environments"]
    train = {env: table[env]["train"] for env in ("a", "b")}
    assert {env: table[env]["mix"] for env in train} == {env: n / sum(train.values()) for env, n in train.items()}
    assert table["all"]["mix"] == 1 and table["all"]["train"] == sum(train.values())


def test_evaluation_tasks_with_a_twin_in_training_are_counted(report):
    keys = sorted((f"t{i}" for i in range(100)), key=key_hash)
    held_out = sum(key_hash(key) < 0.2 for key in keys)
    # Two for evaluation that are alike, and one for evaluation like all those for training.
    prompts = dict.fromkeys(keys[:2], "Other words.") | {key: f"Lone {key}" for key in keys[2 : held_out - 1]}
    found, text = report([{**ROW, "key": key} | {"prompt": prompts.get(key, ROW["prompt"])} for key in keys])
    assert sorted(map(len, found["near_duplicates"])) == [2, 100 - held_out + 1]
    assert found["evaluation_tasks_like_training_tasks"] == [keys[held_out - 1]]
    assert "in 2 groups" in text and "1 evaluation tasks are like a training task" in text


def test_long_lists_are_cut_in_the_text_alone(report):
    found, text = report([{"key": f"t{i}", "prompt": "p"} for i in range(50)])
    assert len(found["problems"]) == 50
    assert text.count("env_key: expected") == 1 and "The same in 49 more tasks: 2, 3, 4, 5, 6, …." in text
    found, text = report([{**ROW, "key": f"t{i}", "env_id": f"e{i}", "env_key": f"f{i}"} for i in range(50)])
    assert "… and 30 more; --json prints all" in text and text.count("\n") < 30


def test_variables_that_look_like_an_answer_are_named(report):
    shown = [{"ANSWER": "7"}, {"ANSWER": "8", "expected_total": 1}, {"CURRENT_DATE": "2026-01-01", "LABELED": 1}]
    rows = [{**ROW, "key": f"t{i}", "env_variables": variables} for i, variables in enumerate(shown)]
    _, text = report(rows)
    assert "env_variables.ANSWER of 2 tasks looks like an answer" in text and text.count("looks like") == 1
    assert not report(rows[2:])[0]["notes"]

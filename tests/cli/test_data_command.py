"""`mfleet data`: inspect, prepare, export."""

import json

import pytest

pytest.importorskip("hydra")

from megatron_fleet import cli
from megatron_fleet.data.dataset import load_tasks

ROW = {"prompt": "Do it.", "env_key": "github", "verifier_code": "v"}


@pytest.fixture
def tasks_file(tmp_path):
    file = tmp_path / "t.json"
    file.write_text(json.dumps([{**ROW, "key": f"t{i}"} for i in range(100)]))
    return str(file)


def test_an_exported_file_is_the_embedded_one(tmp_path, capsys):
    file = tmp_path / "new" / "tasks.json"
    assert cli.main(["data", "export", str(file)]) == 0
    assert load_tasks(file) == load_tasks("embedded")
    assert f"{len(load_tasks(file))} tasks" in capsys.readouterr().out


def test_export_overwrites_nothing(tmp_path, capsys):
    (tmp_path / "t.json").write_text("mine")
    assert cli.main(["data", "export", str(tmp_path / "t.json")]) == 2
    assert (tmp_path / "t.json").read_text() == "mine"
    assert "already exists" in capsys.readouterr().err


def test_inspect_tells_what_is_there(capsys):
    assert cli.main(["data", "inspect", "embedded"]) == 0
    printed = capsys.readouterr()
    tasks = load_tasks("embedded")
    assert printed.out.startswith(f"embedded: {len(tasks)} rows, {len(tasks)} tasks")
    assert all(f"\n{env_key} " in printed.out for env_key in {task.env_key for task in tasks})
    assert "checking 660 tasks" in printed.err and "checking" not in printed.out


def test_inspect_lists_problems_and_fails(tmp_path, capsys):
    (tmp_path / "t.json").write_text('[{"key": "a"}, {"key": "b", "prompt": 3}]')
    assert cli.main(["data", "inspect", str(tmp_path / "t.json")]) == 2
    out = capsys.readouterr().out
    assert "problems: missing 3, wrong value 1" in out
    assert "task 2 (b): prompt: expected text, or a list of one message of the user, found a number 3." in out


def test_inspect_as_json_applies_the_keys(tasks_file, capsys):
    assert cli.main(["data", "inspect", tasks_file, "--json", "data.max_tasks=40", "data.max_eval=3"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["environments"]["github"]["max_tasks"] == 60
    assert found["environments"]["all"]["eval"] == 3


def test_prepare_prints_the_table_and_writes_what_a_run_reads(tasks_file, tmp_path, capsys):
    pytest.importorskip("pyarrow")
    out = str(tmp_path / "p")
    assert cli.main(["data", "prepare", tasks_file, "--out", out, "data=v4"]) == 0
    printed = capsys.readouterr().out
    assert printed.splitlines()[0].split() == ["environment", "total", "train", "eval", "eval", "share", "mix"]
    assert ["github", "100", "80", "20", "20.0%", "100.0%"] in [line.split() for line in printed.splitlines()]
    assert f"{out}: written" in printed
    assert len(load_tasks(out)) == 100
    assert cli.main(["data", "prepare", tasks_file, "--out", out, "data=v4"]) == 0
    assert "the same content" in capsys.readouterr().out
    assert cli.main(["data", "prepare", tasks_file, "--out", out, "data.eval_fraction=0.5"]) == 2
    previous = ["--previous", f"{out}/split.json", "data.eval_fraction=0.5"]
    assert cli.main(["data", "prepare", tasks_file, "--out", f"{out}2", *previous]) == 0
    assert "100     80    20" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["run.steps=3"], "run.steps=3"),
        (["data.max_task=3"], "did you mean data.max_tasks"),
        (["data=v5"], "balanced, embedded, file, v0.2, v0.2.3, v0.3, v4"),
        (["data.environments=[jira]"], "data.environments names jira"),
    ],
)
def test_wrong_keys_are_refused(tasks_file, capsys, arguments, word):
    assert cli.main(["data", "inspect", tasks_file, *arguments]) == 2
    assert word in capsys.readouterr().err


def test_a_missing_file_is_refused(tmp_path, capsys):
    assert cli.main(["data", "prepare", str(tmp_path / "nowhere.json"), "--out", str(tmp_path / "p")]) == 2
    assert "nowhere.json" in capsys.readouterr().err and not (tmp_path / "p").exists()


def test_what_a_task_file_says_does_nothing_to_a_terminal(tmp_path, capsys):
    rows = [{"task_key": "a\u202e", "prompt": "p", "env_key": "e", "\x1b[31m": 1}, {"task_key": "\x07", "env_key": 3}]
    (tmp_path / "t.json").write_text(json.dumps(rows))
    assert cli.main(["data", "inspect", str(tmp_path / "t.json")]) == 2
    assert all(line.isprintable() for line in capsys.readouterr().out.splitlines())

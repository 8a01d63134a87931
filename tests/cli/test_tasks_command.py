"""`mfleet tasks`: export and inspect."""

from megatron_fleet import cli
from megatron_fleet.data.loader import load_tasks


def test_an_exported_file_is_the_embedded_one(tmp_path, capsys):
    file = tmp_path / "new" / "tasks.json"
    assert cli.main(["tasks", "export", str(file)]) == 0
    assert load_tasks(file) == load_tasks("embedded")
    assert f"{len(load_tasks(file))} tasks" in capsys.readouterr().out


def test_export_overwrites_nothing(tmp_path, capsys):
    (tmp_path / "t.json").write_text("mine")
    assert cli.main(["tasks", "export", str(tmp_path / "t.json")]) == 2
    assert (tmp_path / "t.json").read_text() == "mine"
    assert "exists already" in capsys.readouterr().err


def test_inspect_counts(capsys):
    assert cli.main(["tasks", "inspect", "embedded"]) == 0
    text = capsys.readouterr().out
    tasks = load_tasks("embedded")
    assert text.startswith(f"embedded: {len(tasks)} tasks")
    for env_key in {task.env_key for task in tasks}:
        assert f"{env_key}: {sum(task.env_key == env_key for task in tasks)} " in text


def test_inspect_refuses_what_is_no_task_file(tmp_path, capsys):
    (tmp_path / "t.json").write_text('[{"key": "a"}]')
    assert cli.main(["tasks", "inspect", str(tmp_path / "t.json")]) == 2
    assert f"error: {tmp_path / 't.json'}: task 1" in capsys.readouterr().err

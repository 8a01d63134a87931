"""A run's split is written down, a resumed run keeps it, and the embedded tasks are split as they always were."""

import hashlib
import json

import pytest

pytest.importorskip("hydra")

from megatron_fleet.config.errors import UserError
from megatron_fleet.config.load import load
from megatron_fleet.data.dataset import load_tasks, run_dataset, save_manifest
from megatron_fleet.data.split import SplitManifest
from megatron_fleet.evaluation.eval_command import chosen_tasks
from megatron_fleet.loop.run_tasks import load_data


@pytest.fixture
def play(tmp_path):
    """Make the dataset of a run on ``count`` tasks, as the driver does at its start."""

    def _play(count, *overrides, verifier="v"):
        rows = [{"key": f"t{i}", "prompt": "p", "env_key": "e", "verifier_code": verifier} for i in range(count)]
        (tmp_path / "t.json").write_text(json.dumps(rows))
        out = tmp_path / "out"
        config = load(
            ["experiment=quickstart", "data=file", f"data.tasks={tmp_path / 't.json'}", f"run.out={out}", *overrides]
        )
        dataset = run_dataset(config)
        save_manifest(dataset, out)
        return dataset

    return _play


def test_the_manifest_tells_source_hash_rules_and_sides(play, tmp_path):
    dataset = play(100, "data.max_eval=7")
    manifest = SplitManifest.parse((tmp_path / "out" / "split.json").read_bytes(), "m")
    assert manifest == dataset.manifest
    assert manifest.source == str(tmp_path / "t.json")
    assert manifest.sha256 == hashlib.sha256((tmp_path / "t.json").read_bytes()).hexdigest()
    assert manifest.rules["max_eval"] == 7 and manifest.rules["eval_fraction"] == 0.2
    assert manifest.eval == sorted(t.key for t in dataset.split.held_out)
    assert len(manifest.eval) == 7 and len(manifest.train) == 93


def test_a_resumed_run_keeps_its_split_and_a_new_one_does_not(play, tmp_path):
    first = play(100, "data.max_eval=7")
    checkpoint = tmp_path / "out" / "checkpoints" / "step_000005"
    checkpoint.mkdir(parents=True)
    resumed = play(400, "data.max_eval=7")
    assert resumed.split.held_out == first.split.held_out
    checkpoint.rmdir()
    again = play(400, "data.max_eval=7")
    assert again.split.held_out != first.split.held_out


@pytest.mark.parametrize("limit", ["20", "null"])
def test_a_run_and_an_evaluation_say_at_their_start_what_is_evaluated(tmp_path, caplog, capsys, limit):
    """60 of 194 tasks, as once without a word."""
    rows = [
        {"key": f"{env}{i}", "prompt": f"Do {env} {i} times {i}.", "env_key": env, "verifier_code": "v"}
        for env, count in (("github", 200), ("zillow", 10))
        for i in range(count)
    ]
    (tmp_path / "t.json").write_text(json.dumps(rows))
    data = ["data=file", f"data.tasks={tmp_path / 't.json'}", f"run.out={tmp_path / 'out'}"]
    config = load(["experiment=quickstart", "eval=fleet", *data, f"eval.tasks={limit}"])
    held_out = load_data(config)[1]
    zillow = sum(task.env_key == "zillow" for task in held_out)
    expected = [f"20 of {len(held_out)} evaluation tasks are played (eval.tasks)."] if limit == "20" else []
    assert len(held_out) > 20 and 0 < zillow < 5
    said = [record.getMessage() for record in caplog.records]
    assert said[:-1] == expected and said[-1].endswith(f": zillow {zillow} of {zillow}.")
    assert len(chosen_tasks(config, held_out)) == (20 if limit == "20" else len(held_out))
    assert capsys.readouterr().out.splitlines() == said
    caplog.clear()
    load_data(load([*data, "experiment=quickstart", "eval=none"]))
    assert not caplog.records


@pytest.mark.parametrize("verifier", [None, " "])
def test_tasks_need_a_verifier_where_the_environment_does_not_score_by_itself(play, verifier):
    with pytest.raises(
        UserError, match=r"100 tasks, the first of them t\d+, have no verifier_code, and env.kind=embed"
    ):
        play(100, verifier=verifier)
    play(100, "env=openenv", "env.url=http://127.0.0.1:1", verifier=verifier)


def test_the_embedded_split_is_the_one_that_the_quickstart_was_measured_on():
    dataset = run_dataset(load(["experiment=quickstart", "run.out=nowhere"]))
    below = {t.key for t in load_tasks("embedded") if hashlib.md5(t.key.encode()).digest() < bytes([51] * 16)}
    assert {t.key for t in dataset.split.held_out} == below
    assert not (dataset.split.unused or dataset.split.retired or dataset.removed)


def test_filters_that_leave_nothing_are_refused(play):
    with pytest.raises(UserError, match="the filters remove all 10 tasks"):
        play(10, "data.modality=browser_use")


@pytest.mark.parametrize(
    ("overrides", "word"),
    [
        (["data.difficulties=[4]"], "data.difficulties"),
        (["data.modality=voice"], "data.modality"),
        (["data.max_eval=0"], "data.max_eval"),
        (["data.max_env_share=0"], "data.max_env_share"),
    ],
)
def test_values_out_of_range_are_refused(play, overrides, word):
    with pytest.raises(UserError, match=word):
        play(10, *overrides)


def test_paths_are_made_absolute_and_names_of_lists_are_not(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    overrides = ["data.exclusions=[dropbox,mine.yaml]", "data.split_manifest=s.json", "data.tasks=d"]
    data = load(["experiment=quickstart", *overrides]).data
    assert data.exclusions == ("dropbox", str(tmp_path / "mine.yaml"))
    assert (data.split_manifest, data.tasks) == (str(tmp_path / "s.json"), str(tmp_path / "d"))

"""The named presets are the published rules."""

import json

import pytest

pytest.importorskip("hydra")

from megatron_fleet.config import validate
from megatron_fleet.config.load import load
from megatron_fleet.data.dataset import build

RULES = ("duplicates", "exclusions", "eval_fraction", "min_eval_per_env", "max_eval_per_env", "max_eval")
V03 = ("first", ("dropbox", "zillow_partial_dates"), 0.2, 5, 20, 60)


def preset(name, *overrides):
    config = load(["experiment=quickstart", f"data={name}", *overrides])
    validate.check(config)
    return config.data


@pytest.mark.parametrize(
    ("name", "rules", "held_out", "share"),
    [
        ("v0.2", ("first", (), 0.02, 0, None, None), ("outlook",), None),
        ("v0.3", V03, (), 0.2),
        ("v4", V03, (), 0.2),
        ("file", ("refuse", (), 0.2, 0, None, None), (), None),
        ("embedded", ("refuse", (), 0.2, 0, None, None), (), None),
    ],
)
def test_presets(name, rules, held_out, share):
    data = preset(name, *(() if name == "embedded" else ("data.tasks=t.json",)))
    assert tuple(getattr(data, rule) for rule in RULES) == rules
    assert (data.held_out_environments, data.max_env_share) == (held_out, share)
    assert (data.modality, data.environments, data.max_tasks, data.split_manifest) == ("all", (), None, None)


def write(tmp_path, counts):
    rows = [
        {"key": f"{env}_{i}", "prompt": f"Do {i}.", "env_id": env, "verifier_func": "v"}
        for env, count in counts.items()
        for i in range(count)
    ]
    rows.append({**rows[0], "key": "task_a44hx6crecg4_1769052238469_i7dxxtjvq", "env_id": "zillow"})
    (tmp_path / "t.json").write_text(json.dumps({"tasks": [*rows, rows[0]]}))
    return f"data.tasks={tmp_path / 't.json'}"


def test_v02_never_trains_on_outlook(tmp_path):
    result = build(preset("v0.2", write(tmp_path, {"outlook": 30, "booking": 1000}))).split
    assert {t.env_key for t in result.train} == {"booking", "zillow"}
    assert sum(t.env_key == "outlook" for t in result.held_out) == 30
    assert 8 <= sum(t.env_key == "booking" for t in result.held_out) <= 34


@pytest.mark.parametrize("name", ["v0.3", "v4"])
def test_v03_and_v4(tmp_path, name):
    counts = {f"env{i}": 300 for i in range(7)} | {"dropbox": 50, "tiny": 8}
    dataset = build(preset(name, write(tmp_path, counts)))
    reasons = {task.key: reason for task, reason in dataset.removed}
    assert len(reasons) == 52 and reasons["env0_0"] == "duplicate key" and reasons["dropbox_1"] == "dropbox"
    assert reasons["task_a44hx6crecg4_1769052238469_i7dxxtjvq"] == "zillow_partial_dates"
    assert len(dataset.split.held_out) == 60
    # Too few for an evaluation of their own.
    assert sum(t.env_key == "tiny" for t in dataset.split.train) == 8
    assert len(dataset.split.train) == 7 * 300 + 8 - 60


def test_an_impossible_evaluation_is_refused():
    with pytest.raises(Exception, match=r"data\.min_eval_per_env=30 is above data\.max_eval_per_env=20"):
        preset("v4", "data.tasks=t.json", "data.min_eval_per_env=30")

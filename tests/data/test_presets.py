"""The named presets are the published rules, and give the published counts as far as counts decide them."""

import json
import math
from collections import Counter

import pytest

pytest.importorskip("hydra")

from megatron_fleet.config import validate
from megatron_fleet.config.load import load
from megatron_fleet.data.dataset import build
from megatron_fleet.data.split import split
from megatron_fleet.data.task import Task

RULES = (
    *("duplicates", "exclusions", "eval_fraction", "min_eval_per_env", "expected_eval_per_env"),
    *("max_eval_per_env", "max_eval"),
)
BALANCED = ("first", ("dropbox", "zillow_partial_dates"), 0.2, 5, None, 20, 60)

PUBLISHED = {
    "v0.2": {
        "booking": (1070, 19), "dropbox": (1, 0), "fira": (51, 0), "github": (1827, 38), "google-maps": (7, 0),
        "hubspot": (10, 0), "outlook": (0, 19), "reddit": (188, 0), "ticketmaster": (222, 0), "zillow": (33, 0),
    },
    "v0.2.3": {
        "booking": (1059, 30), "fira": (46, 5), "github": (1835, 30), "hubspot": (9, 1), "outlook": (17, 2),
        "reddit": (169, 19), "ticketmaster": (200, 22), "zillow": (30, 3),
    },
    "v0.3": {
        "amazon": (16, 2), "booking": (1313, 23), "carlisle": (36, 2), "dropbox": (3, 0), "fira": (60, 6),
        "fostgres": (923, 26), "github": (2048, 33), "google-maps": (4695, 32), "hubspot": (16, 3),
        "outlook": (36, 3), "reddit": (432, 23), "ticketmaster": (229, 28), "wallst": (65, 4), "zillow": (109, 9),
    },
}  # fmt: skip
"""Training and evaluation tasks of each environment."""
TOTALS = {"v0.2": (3409, 76), "v0.2.3": (3365, 112), "v0.3": (9981, 194)}


def preset(name, *overrides):
    config = load(["experiment=quickstart", f"data={name}", *overrides])
    validate.check(config)
    return config.data


@pytest.mark.parametrize(
    ("name", "rules", "held_out", "share"),
    [
        ("v0.2", ("first", (), 0.02, 5, None, None, None), ("outlook", "instacart"), None),
        ("v0.2.3", ("first", (), 0.1, 0, None, 30, None), (), None),
        ("v0.3", ("first", (), 0.1, 0, 30, None, None), (), None),
        ("balanced", BALANCED, (), 0.2),
        ("v4", BALANCED, (), 0.2),
        ("file", ("refuse", (), 0.2, 0, None, None, None), (), None),
        ("embedded", ("refuse", (), 0.2, 0, None, None, None), (), None),
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


def by_chance(count, chance):
    """The numbers of successes of ``count`` trials that are 5 standard deviations or less from the mean."""
    mean, spread = count * chance, 5 * math.sqrt(count * chance * (1 - chance))
    return range(max(math.ceil(mean - spread), 0), math.floor(mean + spread) + 1)


@pytest.mark.parametrize("salt", range(3))
@pytest.mark.parametrize("name", PUBLISHED)
def test_the_published_counts(name, salt):
    """The keys are made up, so where hashes decide, the count is one that the published rule may give as well."""
    published = PUBLISHED[name]
    assert tuple(map(sum, zip(*published.values(), strict=True))) == TOTALS[name]
    data = preset(name, "data.tasks=t.json")
    tasks = [Task(f"{salt}_{env}_{i}", "p", env, "v") for env, pair in published.items() for i in range(sum(pair))]
    result = split(tasks, data)
    train, held_out = (Counter(t.env_key for t in side) for side in (result.train, result.held_out))
    assert not result.unused and not result.retired
    for env, (trained, evaluated) in published.items():
        total = trained + evaluated
        fraction = min(data.eval_fraction, (data.expected_eval_per_env or total) / total)
        expected = total * fraction
        assert train[env] + held_out[env] == total
        if env in data.held_out_environments or expected < data.min_eval_per_env:
            assert (train[env], held_out[env]) == (trained, evaluated)
        elif data.max_eval_per_env is not None and expected >= 3 * data.max_eval_per_env:
            assert held_out[env] == data.max_eval_per_env
            assert evaluated == held_out[env]
        else:
            assert held_out[env] in by_chance(total, fraction)
            assert held_out[env] <= (data.max_eval_per_env or total)
            assert evaluated in by_chance(total, fraction)


@pytest.mark.parametrize(("modality", "held_out"), [("tool_use", "outlook"), ("computer_use", "instacart")])
def test_v02_fits_files_of_either_modality(tmp_path, modality, held_out):
    rows = [
        {"key": f"{env}_{i}", "prompt": "Do.", "env_id": env, "verifier_func": "v", "task_modality": modality}
        for env, count in ((held_out, 19), ("booking", 1000))
        for i in range(count)
    ]
    (tmp_path / "t.json").write_text(json.dumps(rows))
    result = build(preset("v0.2", f"data.tasks={tmp_path / 't.json'}", f"data.modality={modality}")).split
    assert {t.env_key for t in result.train} == {"booking"}
    assert sum(t.env_key == held_out for t in result.held_out) == 19
    (absent,) = {"outlook", "instacart"} - {held_out}
    assert result.notes == [f"data.held_out_environments names {absent}, which has no tasks."]


@pytest.mark.parametrize("name", ["balanced", "v4"])
def test_balanced_and_v4(tmp_path, name):
    counts = {f"env{i}": 300 for i in range(7)} | {"dropbox": 50, "tiny": 8}
    dataset = build(preset(name, write(tmp_path, counts)))
    reasons = {task.key: reason for task, reason in dataset.removed}
    assert len(reasons) == 52 and reasons["env0_0"] == "duplicate key" and reasons["dropbox_1"] == "dropbox"
    assert reasons["task_a44hx6crecg4_1769052238469_i7dxxtjvq"] == "zillow_partial_dates"
    assert len(dataset.split.held_out) == 60
    # Too few for an evaluation of their own.
    assert sum(t.env_key == "tiny" for t in dataset.split.train) == 8
    assert len(dataset.split.train) == 7 * 300 + 8 - 60

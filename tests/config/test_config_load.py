"""Overrides become a typed tree, or one sentence that says what to do."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("hydra")

from megatron_fleet.config.errors import UserError
from megatron_fleet.config.load import ROOT, dump_resolved, load, load_resolved

QUICKSTART = "experiment=quickstart"


def refusal(*overrides: str, config_dir: Path | None = None) -> str:
    with pytest.raises(UserError) as caught:
        load(overrides, config_dir)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_experiment_composes_over_the_groups():
    config = load([QUICKSTART])
    assert config.model.path == str(ROOT / "assets" / "tiny")
    assert config.model.dtype == "float32"
    assert config.env.kind == "embedded"
    assert config.algorithm.advantage == "grpo"


def test_command_line_wins_over_experiment_also_for_keys_that_no_file_names():
    config = load([QUICKSTART, "run.steps=3", "policy.optimizer.weight_decay=0.1", "policy.optimizer.betas=[0.9,0.95]"])
    assert config.run.steps == 3
    assert config.policy.optimizer.weight_decay == 0.1
    assert config.policy.optimizer.betas == (0.9, 0.95)


@pytest.mark.parametrize(
    ("text", "value"), [("20", 20), ("full", "full"), ("[mlp,layernorm]", ("mlp", "layernorm")), ("[]", ())]
)
def test_recomputation_is_a_word_a_number_or_a_list(text, value):
    assert load([QUICKSTART, f"policy.recompute={text}"]).policy.recompute == value


def test_group_options_apply():
    config = load([QUICKSTART, "algorithm=dr_grpo", "parallel=tensor2"])
    assert config.algorithm.reduction == "constant"
    assert config.algorithm.reduction_constant == config.rollout.max_context
    assert config.parallel.world_size == 2


def group_options() -> list[str]:
    files = sorted((ROOT / "configs").rglob("*.yaml"))
    return [f"{f.parent.relative_to(ROOT / 'configs')}={f.stem}" for f in files if f.name != "config.yaml"]


@pytest.mark.parametrize("option", group_options())
def test_every_option_in_configs_fits_the_schema(option):
    needed = {"env=openenv": ["env.url=http://127.0.0.1:1"], "env=python": ["env.reward=m:f"], "data=embedded": []}
    if option.startswith("data="):
        needed.setdefault(option, ["data.tasks=t.json"])
    model = [] if option.startswith("model=") else ["model=tiny"]
    load([*model, option, *needed.get(option, []), *(["model.path=m"] if option == "model=local" else [])])


def test_relative_paths_of_the_user_start_at_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = load([QUICKSTART, "run.out=here", "model.path=m", "data=file", "data.tasks=t.json"])
    assert (config.run.out, config.model.path) == (str(tmp_path / "here"), str(tmp_path / "m"))
    assert config.data.tasks == str(tmp_path / "t.json")


def test_home_is_expanded(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load([QUICKSTART, "model.path=~/model"]).model.path == str(tmp_path / "model")


def test_a_quoted_none_is_a_text():
    assert load([QUICKSTART, "logging.wandb.project='none'"]).logging.wandb.project == "none"


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(st.text(st.characters(min_codepoint=32, max_codepoint=0x24F), min_size=1).filter(lambda s: s[0] not in "'\""))
def test_text_values_arrive_as_typed(text):
    if text == "null" or "${" in text:
        return
    assert load([QUICKSTART, f"run.name={text}", "run.out=x"]).run.name == text


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("lr=3", "did you mean policy.optimizer.lr?"),
        ("policy.optimiser.lr=3", "did you mean policy.optimizer.lr?"),
        ("rollout.max_contxt=3", "did you mean rollout.max_context?"),
        ("rollout.sampling={temprature: 1}", "did you mean rollout.sampling.temperature?"),
        ("+foo=1", "there is no key foo"),
        ("hydra.run.dir=x", "there is no key hydra.run.dir"),
        ("experiment=quick", "choose one of faults, "),
        ("policy/optimizer=sgd", "choose one of constant, cosine"),
        ("run.steps=many", 'run.steps="many": it must be integer ≥ 0'),
        ("run.steps=true", "run.steps=true: it must be integer ≥ 0"),
        ("run.steps=-1", "run.steps=-1: it must be integer ≥ 0"),
        ("run.steps=1.5", "run.steps=1.5: it must be integer ≥ 0"),
        ("run.deterministic=1", "run.deterministic=1: it must be true/false"),
        ("policy.optimizer.lr=inf", "it must be number > 0"),
        ("policy.optimizer.lr=nan", "it must be number > 0"),
        ("policy.optimizer.betas=[0.9]", "policy.optimizer.betas=[0.9]: it must be [number, number]"),
        ("policy.recompute=0", "policy.recompute=0: it must be one of none, full or integer ≥ 1 or list of one of"),
        ("policy.recompute=true", "policy.recompute=true: it must be one of none, full or integer"),
        ("algorithm.kl.estimator=k4", "it must be one of k1, k2, k3"),
        ("algorithm.dual_clip=0.5", "it must be number > 1 or null"),
        ("logging.wandb.project=none", "logging.wandb.project=none: write null for no value"),
        ("algorithm.dual_clip=None", "algorithm.dual_clip=None: write null for no value"),
        ("run=3", "run=3"),
        ("run.steps=1,2", "sweeps"),
        ("~run.steps", "deletes"),
        ("run.steps", "write key=value"),
        ("run.steps=${rollout.nope}", "rollout.nope"),
        ("data=file", "data.tasks must be set; add data.tasks=…"),
        ("model=local", "model.path must be set; add model.path=…"),
    ],
)
def test_bad_overrides_are_explained(override, said):
    assert said in refusal(QUICKSTART, override)


def test_a_second_problem_is_named():
    assert "(1 more: run.steps.)" in refusal(QUICKSTART, "run.seed=-1", "run.steps=-1")


def config_folder(tmp_path: Path, text: str) -> Path:
    (tmp_path / "config.yaml").write_text(text)
    return tmp_path


def test_unknown_key_in_a_file_is_explained(tmp_path):
    assert "did you mean run.steps?" in refusal(config_dir=config_folder(tmp_path, "run: {name: a, out: b, step: 1}"))


def test_broken_yaml_names_the_file(tmp_path):
    assert "config.yaml" in refusal(config_dir=config_folder(tmp_path, "run: [1"))


def test_missing_folder_is_explained(tmp_path):
    assert "no config.yaml there" in refusal(config_dir=tmp_path)


def test_resolved_file_round_trips(tmp_path):
    config = load([QUICKSTART, "algorithm.dual_clip=3.0"])
    (tmp_path / "c.json").write_text(dump_resolved(config))
    assert load_resolved(tmp_path / "c.json") == config


@pytest.mark.parametrize("damage", ["", "{", "[]", json.dumps({"run": 1})])
def test_damaged_resolved_file_is_refused(tmp_path, damage):
    (tmp_path / "c.json").write_text(damage)
    with pytest.raises(UserError):
        load_resolved(tmp_path / "c.json")


def test_a_resolved_configuration_takes_overrides(tmp_path):
    config = load(["experiment=quickstart"])
    (tmp_path / "c.json").write_text(dump_resolved(config))
    changed = load_resolved(tmp_path / "c.json", ["parallel.data=3", "run.name=a=b", "policy.optimizer.lr=1e-3"])
    assert (changed.parallel.data, changed.run.name, changed.policy.optimizer.lr) == (3, "a=b", 1e-3)
    assert changed.rollout == config.rollout
    other = load_resolved(tmp_path / "c.json", ["algorithm.kl.estimator=k2", "policy.safety.spike_factor=null"])
    assert (other.algorithm.kl.estimator, other.policy.safety.spike_factor) == ("k2", None)
    for override, message in (
        ("parallel.dta=3", "there is no key parallel.dta; did you mean parallel.data?"),
        ("parallel=3", "there is no key parallel"),
        ("parallel.data", "write key=value"),
        ("parallel.data=[", 'parallel.data="[": it must be integer ≥ 1'),
        ("parallel.data=0", "it must be integer ≥ 1"),
        ("logging.wandb.project=none", "write null for no value"),
    ):
        with pytest.raises(UserError, match=re.escape(message)):
            load_resolved(tmp_path / "c.json", [override])

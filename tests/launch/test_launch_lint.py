"""Workflow, scripts and manifests of launch/, as they are and as they are rendered, pass the linters; the workflow
checks its inputs."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml
from namespace_hosts import ROOT
from waiting import HANG_S

from megatron_fleet.config import validate
from megatron_fleet.config.load import load
from megatron_fleet.config.schema import SkyPilotConfig
from megatron_fleet.launch import plan as planning
from megatron_fleet.launch.kubernetes import Kubernetes
from megatron_fleet.launch.plan import plan
from megatron_fleet.launch.skypilot import SkyPilot
from megatron_fleet.launch.slurm import Slurm

PROGRAMS = Path(sys.prefix, "bin")
WORKFLOWS = ROOT / ".github" / "workflows"
WORKFLOW, TINKER_WORKFLOW = WORKFLOWS / "train.yml", WORKFLOWS / "train_tinker.yml"
SCRIPTS = sorted([*(ROOT / "launch").rglob("*.sh"), *(ROOT / "launch").rglob("*.sbatch")])
MANIFESTS = sorted([*(ROOT / "launch").rglob("*.yaml"), *(ROOT / "configs" / "cluster").glob("*.yaml")])
linters = pytest.mark.skipif(not (PROGRAMS / "actionlint").exists(), reason="needs the engine environment's linters")
STORE = "checkpoint.store.url=s3://bucket/prefix"


def lint(program: str, *arguments: object) -> str:
    """Run a linter; returns its findings, empty when there are none."""
    words = [str(PROGRAMS / program), *map(str, arguments)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=HANG_S, check=False)
    return "" if done.returncode == 0 else done.stdout + done.stderr


def rendered(folder: Path) -> tuple[list[Path], list[Path]]:
    """Scripts and manifests of jobs with as many options as there are."""
    two = ["parallel.data=2", "cluster.nodes=2", "checkpoint.export.last=false", STORE]
    slurm = plan(
        [["experiment=quickstart", "cluster=slurm", "launch.min_hosts=1", "rollout.engine.replicas=2", *two]],
        {"A": "b"},
    )
    sky = plan([["experiment=quickstart", "cluster=skypilot", *two]], {"WANDB_API_KEY": "x"})
    kubernetes = plan([["experiment=quickstart", "cluster=kubernetes", "launch.image=a/b:c", *two]], {})
    files = [
        *((f"slurm-{name}", text) for name, text in Slurm().render(slurm).files.items()),
        *((f"sky-{name}", text) for name, text in SkyPilot().render(sky).files.items()),
        *((f"kubernetes-{name}", text) for name, text in Kubernetes().render(kubernetes).files.items()),
    ]
    for name, text in files:
        (folder / name).write_text(text)
    scripts = [folder / name for name, _ in files if name.endswith(".sbatch")]
    return scripts, [folder / name for name, _ in files if name.endswith(".yaml")]


def sections(manifest: Path) -> list[str]:
    """Shell scripts within a task of SkyPilot."""
    task = yaml.safe_load(manifest.read_text())
    return [task[name] for name in ("setup", "run") if name in task]


@linters
def test_the_workflows_pass_actionlint():
    assert lint("actionlint", "-shellcheck", PROGRAMS / "shellcheck", WORKFLOW, TINKER_WORKFLOW) == ""


@linters
def test_scripts_pass_shellcheck(tmp_path, monkeypatch):
    monkeypatch.setattr(planning, "commit", lambda: "abc")
    scripts, manifests = rendered(tmp_path)
    for manifest in (ROOT / "launch" / "skypilot" / "train.yaml", tmp_path / "sky-job.yaml"):
        for index, text in enumerate(sections(manifest)):
            scripts.append(tmp_path / f"{manifest.stem}-{index}.sh")
            scripts[-1].write_text(f"#!/usr/bin/env bash\n{text}")
    assert lint("shellcheck", *SCRIPTS, *scripts) == ""
    assert lint("yamllint", "--strict", "-c", ROOT / ".yamllint.yaml", *MANIFESTS, WORKFLOW, TINKER_WORKFLOW) == ""
    # Long arguments are what they are.
    relaxed = "{extends: default, rules: {line-length: disable, indentation: {indent-sequences: whatever}}}"
    assert lint("yamllint", "--strict", "-d", relaxed, *manifests) == ""


@linters
def test_the_linters_find_something(tmp_path):
    (tmp_path / "bad.sh").write_text("#!/bin/sh\nrm $1\n")
    assert "SC2086" in lint("shellcheck", tmp_path / "bad.sh")
    (tmp_path / "bad.yml").write_text(WORKFLOW.read_text().replace("inputs.task_name", "inputs.task_nam"))
    assert 'property "task_nam" is not defined' in lint("actionlint", tmp_path / "bad.yml")


@pytest.mark.parametrize("path", [WORKFLOW, TINKER_WORKFLOW], ids=lambda path: path.stem)
def test_a_workflow_hands_all_its_inputs_on_and_puts_nothing_into_a_shell(path):
    workflow = yaml.safe_load(path.read_text())
    (job,) = workflow["jobs"].values()
    assert [step["run"] for step in job["steps"] if "run" in step and "${{" in step["run"]] == []
    assert workflow["permissions"] == {"contents": "read"}
    names = {name for step in job["steps"] for name, value in step.get("env", {}).items() if "inputs." in str(value)}
    assert {name.lower() for name in names} == set(workflow["on"]["workflow_dispatch"]["inputs"])


def test_the_workflow_offers_what_there_is():
    inputs = yaml.safe_load(WORKFLOW.read_text())["on"]["workflow_dispatch"]["inputs"]
    experiments = {path.stem for path in (ROOT / "configs" / "experiment").glob("*.yaml")}
    assert set(inputs["task_name"]["options"]) <= experiments
    assert inputs["cloud"]["options"] == ["any", *SkyPilotConfig().infra]


GOOD = {
    "TASK_NAME": "qwen3_8b_fleet",
    "MODALITY": "tool_use",
    "DATA_VERSION": "v4",
    "CLOUD": "any",
    "STORE": "s3://bucket/checkpoints",
    "FLEET_API_KEY": "planted-fleet-key",
    "WANDB_API_KEY_TOOL_USE": "planted-wandb-key",
    "SLACK_BOT_TOKEN": "",
}


TINKER_GOOD = {
    "MODEL_NAME": "Qwen/Qwen3-8B",
    "MAX_STEPS": "50",
    "BATCH_SIZE": "8",
    "N_SAMPLES_PER_PROMPT": "4",
    "MODALITY": "tool_use",
    "STORE": "s3://bucket/checkpoints",
    "TINKER_API_KEY": "tml-planted",
    "TINKER_API_URL": "",
    "SLACK_BOT_TOKEN": "",
}


def submitted(
    folder: Path, script: str = "workflow.sh", good: Mapping[str, str] = GOOD, **inputs: str
) -> subprocess.CompletedProcess[str]:
    """Run a workflow's script with a stand-in for mfleet that prints its arguments."""
    program = folder / "mfleet"
    empty = "".join(f'[ -z "${{{name}+x}}" ] || echo "an empty secret"\n' for name, value in good.items() if not value)
    program.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@"\n{empty}true\n')
    program.chmod(0o755)
    environ = {"PATH": os.environ["PATH"], "MFLEET": str(program), **good, **inputs}
    command = [ROOT / "launch" / script]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=HANG_S, check=False)


def test_inputs_of_the_workflow_become_overrides(tmp_path):
    done = submitted(
        tmp_path,
        ENV_KEY="booking,jira",
        MAX_TASKS="20",
        STEPS="50",
        CLOUD="nebius",
        MODEL="Qwen/Qwen3-8B@main",
        RUN_ID="a_1",
    )
    assert done.returncode == 0, done.stderr
    words = done.stdout.splitlines()
    assert words[:4] == ["launch", "--detach", "cluster=skypilot", "experiment=qwen3_8b_fleet"]
    assert "data.tasks=s3://fleet-internal-datasets/v4/openenv/all_tool_use.json" in words
    assert {"data.environments=[booking,jira]", "data.max_tasks=20", "run.steps=50", "run.epochs=null"} <= set(words)
    assert {"launch.skypilot.infra=[nebius]", "model.path=Qwen/Qwen3-8B@main", "run.resume=must"} <= set(words)
    assert "planted" not in done.stdout + done.stderr and "an empty secret" not in words
    experiments_own = submitted(tmp_path, DATA_VERSION="").stdout
    assert "data.modality=tool_use\n" in experiments_own and "data.tasks=" not in experiments_own


def test_what_the_workflow_submits_is_a_valid_job(tmp_path, monkeypatch):
    monkeypatch.setattr(planning, "commit", lambda: "abc")
    words = submitted(tmp_path, ENV_KEY="booking", STEPS="5").stdout.splitlines()[2:]
    job = plan([words], GOOD)
    SkyPilot().check(job)
    assert job.secrets == ("FLEET_API_KEY", "WANDB_API_KEY_TOOL_USE")
    assert yaml.safe_load(SkyPilot().render(job).files["job.yaml"])["envs"]["FLEET_PACKAGE"] == "~/fleet-openenv"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TASK_NAME", "no_such_experiment"),
        ("TASK_NAME", "../quickstart"),
        ("MODALITY", "voice"),
        ("MODALITY", ""),
        ("ENV_KEY", "a];b"),
        ("ENV_KEY", "$(id)"),
        ("MAX_TASKS", "0"),
        ("STEPS", "1e3"),
        ("CLOUD", "azure"),
        ("MODEL", "a b"),
        ("MODEL", "a/b\nrun.seed=1"),
        ("RUN_ID", "-x"),
        ("STORE", "gs://bucket"),
        ("STORE", ""),
    ],
)
def test_inputs_that_are_none_are_refused(tmp_path, name, value):
    done = submitted(tmp_path, **{name: value})
    assert done.returncode == 2 and done.stdout == "" and done.stderr.startswith("error: ")


def trained(folder: Path, **inputs: str) -> subprocess.CompletedProcess[str]:
    return submitted(folder, "tinker.sh", TINKER_GOOD, **inputs)


def test_the_hosted_workflow_trains_with_its_inputs(tmp_path):
    inputs = yaml.safe_load(TINKER_WORKFLOW.read_text())["on"]["workflow_dispatch"]["inputs"]
    theirs = {"model_name": "Qwen/Qwen3-8B", "max_steps": "50", "batch_size": "8", "n_samples_per_prompt": "4"}
    assert {name: inputs[name]["default"] for name in theirs} == theirs
    done = trained(tmp_path, BUDGET_USD="12.50", RUN_ID="a_1", ENV_KEY="booking,jira", TIME_LIMIT_S="20000")
    command, *words = done.stdout.splitlines()
    assert command == "train" and "an empty secret" not in words and "planted" not in done.stdout
    config = load(words)
    validate.check(config)
    assert (config.policy.trainer, config.hosted.model(config.model.path)) == ("hosted", "Qwen/Qwen3-8B")
    assert (config.run.steps, config.rollout.prompts_per_step, config.rollout.samples_per_prompt) == (50, 8, 4)
    assert (config.hosted.budget_usd, config.run.time_limit_s, config.run.resume) == (12.5, 20000, "must")
    assert config.data.environments == ("booking", "jira") and config.logging.wandb.project == "fleet-tinker-grpo"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MODEL_NAME", "a b"),
        ("MAX_STEPS", ""),
        ("BATCH_SIZE", "0"),
        ("BUDGET_USD", "-1"),
        ("RUN_ID", "$(id)"),
        ("STORE", ""),
    ],
)
def test_inputs_of_the_hosted_workflow_that_are_none_are_refused(tmp_path, name, value):
    done = trained(tmp_path, **{name: value})
    assert done.returncode == 2 and done.stdout == "" and done.stderr.startswith("error: ")


def test_a_modality_that_no_experiment_has_a_file_of_needs_a_version(tmp_path):
    done = submitted(tmp_path, MODALITY="browser_use", DATA_VERSION="")
    assert done.returncode == 2 and done.stderr.startswith("error: DATA_VERSION is empty")
    words = submitted(tmp_path, MODALITY="browser_use", DATA_VERSION="v6").stdout.splitlines()
    assert "data.tasks=s3://fleet-internal-datasets/v6/openenv/all_browser_use.json" in words


def test_a_runner_needs_no_more_than_it_installs(tmp_path):
    pinned = dict(
        line.split("==") for line in (ROOT / "requirements" / "launch.txt").read_text().splitlines() if "==" in line
    )
    lock = (ROOT / "requirements" / "engine.lock").read_text().splitlines()
    assert {f"{name}=={version}" for name, version in pinned.items()} <= set(lock)
    program = """
import sys
from importlib.metadata import packages_distributions
from megatron_fleet import cli
image = ["launch.image=a", "launch.install=false"]
cli.main(["launch", "--dry-run", "experiment=quickstart", "cluster=skypilot", "STORE", *image])
where = packages_distributions()
found = {d for m in list(sys.modules) for d in where.get(m.partition(".")[0], [])}
print("loaded", *found, file=sys.stderr)
"""
    done = subprocess.run(
        [sys.executable, "-c", program.replace("STORE", STORE)],
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=True,
    )
    loaded = set(done.stderr.splitlines()[-1].split()[1:])
    of_these = {"annotated-types", "pydantic_core", "typing-inspection", "typing_extensions", "packaging"}
    of_the_machine = {"megatron_fleet", "setuptools", "attrs"}
    assert loaded - set(pinned) - of_these - of_the_machine == set(), shlex.join(loaded)


def test_files_of_credentials_are_for_their_owner_alone(tmp_path):
    keys = {
        "LAMBDA_API_KEY": "planted-1",
        "RUNPOD_API_KEY": "planted-2",
        "NEBIUS_CREDENTIALS_JSON": '{"a": "planted-3"}',
    }
    script = ROOT / "launch" / "skypilot" / "credentials.sh"
    environ = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), **keys}
    done = subprocess.run([script], env=environ, capture_output=True, text=True, timeout=HANG_S, check=True)
    written = {path.name: path for path in tmp_path.rglob("*") if path.is_file()}
    assert set(written) == {"lambda_keys", "config.toml", "credentials.json"} and done.stdout + done.stderr == ""
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in written.values())
    assert re.search('"planted-2"', written["config.toml"].read_text())

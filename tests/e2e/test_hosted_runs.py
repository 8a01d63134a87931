"""Whole runs at a hosted service: they learn, and are the same whatever dies on either side."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from gcs_server import GCS_BUCKET, found_by_google
from tinker_service import BASE_MODEL, KEY, running
from whole_runs import SMALL, Run, wait_for

from megatron_fleet.hosted.spending import SPENT
from megatron_fleet.hosted.states import SAVED, STATE
from megatron_fleet.storage.open import open_folder

pytest.importorskip("tinker")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

ROOT = Path(__file__).parents[2]
STEPS = 8
KILLS = int(os.environ.get("MFLEET_TEST_KILLS", "4"))
REWARD = """
def vowels(text, task):
    return sum(text.count(vowel) for vowel in "aeiou") / max(1, len(text))
"""


@pytest.fixture
def service(tmp_path, monkeypatch):
    monkeypatch.setenv("TINKER_API_KEY", KEY)
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with running(tmp_path / "service", "--cycle-s", "0.2") as client:
        yield client


@pytest.fixture
def make_run(tmp_path, monkeypatch, service):
    (tmp_path / "vowels_reward.py").write_text(REWARD)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    rows = [{"task_key": f"write-{i}", "env_key": "letters", "prompt": f"Write {i} vowels."} for i in range(8)]
    (tmp_path / "tasks.json").write_text(json.dumps(rows))

    def made(name: str, *overrides: str) -> Run:
        return Run(
            tmp_path / name,
            (
                *("trainer=hosted", f"hosted.url={service.url}", f"hosted.base_model={BASE_MODEL}"),
                *(
                    "env=python",
                    "env.reward=vowels_reward:vowels",
                    "data=file",
                    f"data.tasks={tmp_path / 'tasks.json'}",
                ),
                *("policy.optimizer.lr=0.6", "policy.optimizer.schedule=constant", "policy.optimizer.min_lr=0"),
                *("rollout.thinking=false", "rollout.sampling.max_tokens_per_turn=32", "rollout.samples_per_prompt=16"),
                *("rollout.engine.probe_interval=1", "algorithm.masked_outcomes=[]", "eval=none", f"run.steps={STEPS}"),
                *(f"hosted.prices.{kind}=1" for kind in ("prefill", "cached_prefill", "sample", "train")),
                *overrides,
            ),
        )

    return made


def rewards(run: Run) -> list[float]:
    return [row["reward/avg_raw_reward"] for row in run.metrics()]


def assert_all_states_are_known(service, *runs: Run) -> None:
    """The service holds the states of the checkpoints that these runs keep, and no other."""
    every = []
    for run in runs:
        kept = [json.loads(file.read_text())["path"] for file in (run.out / "checkpoints").glob(f"*/{STATE}")]
        assert sorted((run.out / SAVED).read_text().split()) == sorted(kept)
        every += kept
    assert sorted(every) == service.ask("requests")["saved"]


def test_a_run_learns_and_resumes_to_the_bit(make_run, service):
    whole = make_run("whole")
    whole.finish()
    whole.assert_nothing_left()
    found = rewards(whole)
    assert np.mean(found[-2:]) > np.mean(found[:2]) + 0.1, found
    rows = whole.metrics()
    assert all(row["policy/probe_difference"] < 1e-6 and row["policy/mismatch_kl"] < 1e-9 for row in rows)
    assert_all_states_are_known(service, whole)
    assert len(service.paths("optim_step")) == STEPS
    # The last weights of a batch are saved with its step; nothing is asked for twice.
    assert len(service.paths("save_weights_for_sampler")) == STEPS + 1
    assert (whole.out / "hf" / "adapter_model.safetensors").stat().st_size > 0
    check_cost(whole)

    make_run("halves", "run.steps=2").finish()
    service.restart()
    resumed = make_run("halves", "run.steps=4")
    resumed.finish()
    assert resumed.facts() == whole.facts()[:4]


def check_cost(run: Run) -> None:
    """Every token is counted, once for each price: those of the episodes, and those of the probe."""
    rows, total = run.metrics(), json.loads((run.out / SPENT).read_text())
    kinds = ("sampled", "prefill_cached", "prefill_uncached", "trained")
    assert {kind: sum(row[f"tokens/{kind}"] for row in rows) for kind in kinds} == total
    # The probe scores 4 sequences by a forward pass and by the sampler after each step, and the sampler at the start.
    assert all(row["tokens/sampled"] == row["generate/action_tokens"] for row in rows)
    assert all(row["tokens/trained"] > row["accounting/trained_tokens"] for row in rows)
    assert rows[-1]["cost/cumulative_usd"] == pytest.approx(sum(total.values()) / 1e6)
    assert json.loads((run.out / "summary.json").read_text())["cost_usd"] == rows[-1]["cost/cumulative_usd"]


@pytest.mark.nightly(minutes=1)
def test_episodes_are_played_ahead_of_the_weights(make_run, service):
    """With stale episodes allowed, a killed run resumes and finishes."""
    run = make_run("ahead", "rollout.max_staleness=2", "algorithm=importance_weighted", "checkpoint.interval=2")
    process = run.start()
    wait_for(lambda: (run.out / "metrics.jsonl").exists() and len(run.metrics()) >= 3, process)
    process.kill()
    process.communicate()
    run.finish()
    rows = run.metrics()
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert 0 < max(row["async/staleness_max"] for row in rows) <= 2
    assert_all_states_are_known(service, run)


def without_attempts(run: Run) -> list[dict[str, float]]:
    """Its metrics but for the number of episodes that were lost with a sampler and played again."""
    return [{k: v for k, v in row.items() if not k.startswith("accounting/attempts_")} for row in run.facts()]


@pytest.mark.nightly(minutes=3)
def test_a_run_is_the_same_whatever_dies(make_run, service):
    """The controller, the sampler's process or the service, at random moments."""
    began = time.monotonic()
    (whole := make_run("whole")).finish()
    seconds, rng, runs = time.monotonic() - began, random.Random(0), [whole]
    for number in range(KILLS):
        run, victim = make_run(f"killed-{number}"), ("controller", "sampler", "service")[number % 3]
        process = run.start()
        killer = threading.Timer(rng.uniform(0.1, 0.9) * seconds, kill, (victim, process, run, service))
        killer.start()
        output = process.communicate(timeout=1800)[0]
        killer.join()
        assert (process.returncode == -signal.SIGKILL) == (victim == "controller"), output + run.logs()
        run.finish()
        assert without_attempts(run) == without_attempts(whole), (number, victim)
        run.assert_nothing_left()
        runs.append(run)
    assert_all_states_are_known(service, *runs)


@pytest.mark.nightly(minutes=1)
def test_a_killed_run_goes_on_from_its_bucket_elsewhere(make_run, service):
    """Its folder is lost; the states at the service, and what they have cost, are known from the checkpoint."""
    (whole := make_run("whole")).finish()
    with found_by_google():
        bucket = open_folder(f"gs://{GCS_BUCKET}")
        run = make_run("killed", "run.id=killed", f"checkpoint.store.url=gs://{GCS_BUCKET}/runs")
        process = run.start()
        wait_for(lambda: any(name.endswith("killed/global_step_3/manifest.json") for name in bucket.sizes()), process)
        process.kill()
        process.communicate()
        shutil.rmtree(run.out)
        run.finish()
    assert run.facts() == whole.facts()
    check_cost(whole)
    spent, of_whole = (json.loads((r.out / SPENT).read_text()) for r in (run, whole))
    assert spent["trained"] >= of_whole["trained"]
    assert spent["sampled"] >= of_whole["sampled"] * (1 - 2 / STEPS)  # of the steps at the kill nobody knows
    of_this_run = [path for path in service.ask("requests")["saved"] if "/killed-" in path]
    assert sorted((run.out / SAVED).read_text().split()) == of_this_run


def kill(victim: str, process, run: Run, service) -> None:
    if victim == "service":
        service.restart()
    elif victim == "controller":
        process.kill()
    else:
        for line in run.processes():
            if "HostedSampler" in line:
                os.kill(int(line.split()[0]), signal.SIGKILL)


@pytest.mark.nightly(minutes=3)
def test_the_environment_of_hosted_runs_needs_no_torch(tmp_path, make_run, service):
    """Made by setup.sh from nothing, it checks a run and plays one."""
    for name in ("megatron_fleet", "configs", "requirements", "assets"):
        shutil.copytree(ROOT / name, tmp_path / "project" / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.sh", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / "project" / name)
    subprocess.run(["./setup.sh", "--hosted"], cwd=tmp_path / "project", check=True)
    binaries = tmp_path / "project" / ".venv" / "hosted" / "bin"
    for package in ("torch", "vllm", "megatron.core", "transformers"):
        assert subprocess.run([binaries / "python", "-c", f"import {package}"], capture_output=True).returncode == 1
    model = tmp_path / "model"
    model.mkdir()
    for file in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(ROOT / "assets" / "tiny" / file, model)
    run = make_run("run", f"model.path={model}", "run.steps=2")
    run.command = lambda: [str(binaries / "mfleet")]
    checked = subprocess.run(
        [binaries / "mfleet", "train", "experiment=quickstart", "--dry-run", *SMALL, *run.overrides],
        capture_output=True,
        text=True,
    )
    assert "ranks: none, policy.trainer=hosted" in checked.stdout, checked.stderr
    run.finish()
    assert len(run.metrics()) == 2

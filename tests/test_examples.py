"""The examples do what they say, through the keys that they are for."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from waiting import HANG_S
from weight_fixtures import random_tensors, tiny_config, write_folder

from megatron_fleet.algorithms.advantages import group_advantages
from megatron_fleet.algorithms.loss_inputs import LossInputs
from megatron_fleet.algorithms.loss_metrics import finalize_metrics
from megatron_fleet.algorithms.losses import make_loss
from megatron_fleet.config.errors import UserError
from megatron_fleet.config.schema import AlgorithmConfig
from megatron_fleet.preflight.own_parts import OWN_PARTS, interface

EXAMPLES = Path(__file__).parents[1] / "examples"
README = (EXAMPLES / "README.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^    (\.\./.*)$", README.replace("\\\n", " "), re.MULTILINE)
LLAMA = tiny_config(model_type="llama")


def test_the_table_has_every_interface():
    def code(text: str) -> str:
        return f"`{text}`".replace("|", "\\|")

    rows = [line.split(" | ") for line in README.splitlines() if line.startswith("| ")][1:]
    for row, key in zip(rows, OWN_PARTS, strict=True):
        declared = interface(key)
        arguments = ", ".join(code(f"{name}: {kind}") for name, kind in declared.arguments.items()) or "nothing"
        result = "awaitable " * declared.is_async + code(declared.result)
        part = f"| {declared.part}", code(key)
        assert (*row[:2], *row[3:]) == (*part, arguments, result, f"{declared.runs_in} |"), key


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_commands_run_as_written(command, tmp_path):
    """Training as a dry run; whole runs with parts of a user's own are in tests/e2e."""
    shutil.copytree(EXAMPLES, tmp_path / "examples", ignore=shutil.ignore_patterns("__pycache__", "runs"))
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "engine").symlink_to(sys.prefix)
    if "mfleet train " in command:
        command += " --dry-run"
    else:
        mistral = LLAMA | {"model_type": "mistral", "sliding_window": None}
        command = command.replace("HF_DIR", str(write_folder(tmp_path / "hf", mistral, random_tensors(LLAMA))))
    done = subprocess.run(
        ["bash", "-c", command], cwd=tmp_path / "examples", capture_output=True, text=True, timeout=HANG_S
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_all_parts_are_in_the_commands():
    assert len(COMMANDS) > 5
    assert [key for key in OWN_PARTS if key != "model.family" and f" {key}=" not in " ".join(COMMANDS)] == []


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)


def module(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> str:
    """The name of a new module with this text."""
    name = f"own_{abs(hash(text))}"
    (folder / f"{name}.py").write_text(f"{text}\n")
    monkeypatch.syspath_prepend(folder)
    return name


def inputs(log_ratio: list[float], weights: list[float]) -> LossInputs:
    n = len(log_ratio)
    logprobs = torch.tensor(log_ratio, requires_grad=True)
    sequence = torch.zeros(n, dtype=torch.int64)
    rest = {"entropy": torch.zeros(n), "loss_scale": torch.ones(n), "behaviour": torch.zeros(n), "sequence": sequence}
    arrays = {"proximal": torch.zeros(n)}
    return LossInputs(logprobs=logprobs, scaled_advantages=torch.tensor(weights), sequences=1, arrays=arrays, **rest)


def test_the_loss_clips_at_its_own_bounds():
    x = inputs([0.0, 1.0, 1.0, -1.0, -1.0], [1.0, 1.0, -1.0, 1.0, -1.0])
    loss, sums = make_loss(AlgorithmConfig(loss="my_loss:asymmetric_clip"))(x)
    e = float(np.e)
    assert loss.item() == pytest.approx(-(1.0 + 1.28 - e + 1 / e - 0.8))
    loss.backward()
    assert (x.logprobs.grad != 0).tolist() == [True, False, True, True, False]
    assert finalize_metrics({name: float(value) for name, value in sums.items()})["policy/own/outside"] == 0.8


def test_the_same_loss_of_ours_gives_the_same():
    x = inputs([0.0, 1.0, 1.0, -1.0, -1.0], [1.0, 1.0, -1.0, 1.0, -1.0])
    ours, _ = make_loss(AlgorithmConfig(loss="ppo_clip", clip_low=0.2, clip_high=0.28))(x)
    theirs, _ = make_loss(AlgorithmConfig(loss="my_loss:asymmetric_clip"))(x)
    assert ours.item() == pytest.approx(theirs.item())


def test_the_advantages_are_ranks():
    given = group_advantages([0.0, None, 10.0, 1.0, 1.0], "my_advantage:ranks")
    assert given == [-1.0, None, 1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("rewards[:-1]", r"returned \[0\.\] for 2 rewards"),
        ("rewards * float('nan')", r"returned \[nan nan\] for 2 rewards"),
        ("None", "returned None for 2 rewards"),
    ],
)
def test_what_are_no_advantages_is_refused(tmp_path, monkeypatch, code, words):
    name = module(tmp_path, monkeypatch, f"def own(rewards): return {code}")
    with pytest.raises(UserError, match=f"^algorithm.advantage={name}:own {words}"):
        group_advantages([0.0, 1.0], f"{name}:own")


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("inputs.scaled_advantages[:1], {}", r"gave values of shape \(1,\) for 2 tokens"),
        ("inputs.scaled_advantages", "ValueError|TypeError"),
        ("5, {}", "AttributeError"),
        ("inputs.scaled_advantages, {'a/b': inputs.scaled_advantages.sum()}", "'a/b' cannot name a metric"),
        ("None", "TypeError"),
    ],
)
def test_what_is_no_loss_is_refused(tmp_path, monkeypatch, code, words):
    name = module(tmp_path, monkeypatch, f"def own(inputs, algorithm): return {code}")
    with pytest.raises(UserError, match=f"^algorithm.loss={name}:own:? .*({words})"):
        make_loss(AlgorithmConfig(loss=f"{name}:own"))(inputs([0.0, 0.0], [1.0, 1.0]))

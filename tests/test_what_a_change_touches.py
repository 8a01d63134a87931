"""The table "What a change touches" of CONTRIBUTING.md: a dummy of each kind works, in the files that its row names."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from waiting import HANG_S

pytest.importorskip("torch")
pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
TABLE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split("## What a change touches")[1]
ROWS = dict(re.findall(r"^\| (.+?) \| (.+) \|$", TABLE, re.MULTILINE)[1:])
MOST_FILES = 3
"""Most places that a row may name, presets of ``configs/`` not counted."""


@dataclass(frozen=True)
class Change:
    """A dummy of one kind.

    Attributes:
        edits: path → text there, and what it becomes.
        files: path → content of a new file.
        check: statements that fail unless the dummy is used; ``load`` composes a configuration.
    """

    check: str
    edits: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)


CHANGES = {
    "a loss": Change(
        edits={
            "algorithms/policy_terms.py": (
                "POLICY_TERMS: dict[str, PolicyTerm] = {",
                "def dummy(x, algorithm):\n    return 3 * x.scaled_advantages, {}\n\n\n"
                'POLICY_TERMS: dict[str, PolicyTerm] = {"dummy": dummy,',
            ),
            "algorithms/explicit_losses.py": (
                "TERMS: dict[str, Callable[[TrainedTokens, AlgorithmConfig], Term]] = {",
                "def _dummy(x, algo):\n    return Term(3 * x.scaled_advantages, 0 * x.logprobs, {})\n\n\n"
                'TERMS: dict[str, Callable[[TrainedTokens, AlgorithmConfig], Term]] = {"dummy": _dummy,',
            ),
            "config/sections/algorithm.py": ('LOSS_NAMES = ("', 'LOSS_NAMES = ("dummy", "'),
        },
        check="""
from megatron_fleet.algorithms.explicit_losses import explicit_loss
from megatron_fleet.algorithms.losses import make_loss
algorithm = load("algorithm.loss=dummy").algorithm
assert make_loss(algorithm)(inputs())[0] == explicit_loss(algorithm, tokens()).value == -6
""",
    ),
    "a KL estimator": Change(
        edits={
            "algorithms/kl.py": (
                '    if estimator == "k3":',
                '    if estimator == "dummy":\n        return d * 7\n    if estimator == "k3":',
            ),
            "algorithms/explicit_losses.py": (
                '    if estimator == "k3":',
                '    if estimator == "dummy":\n        return d * 7, 7 + 0 * d\n    if estimator == "k3":',
            ),
            "config/sections/algorithm.py": ('estimator: Literal["', 'estimator: Literal["dummy", "'),
        },
        check="""
from megatron_fleet.algorithms.explicit_losses import _kl
from megatron_fleet.algorithms.kl import kl_estimate
found = load("algorithm.kl.estimator=dummy").algorithm.kl.estimator
assert kl_estimate(torch.ones(2), torch.zeros(2), found).tolist() == [7, 7]
assert _kl(np.ones(2), found)[0].tolist() == [7, 7]
""",
    ),
    "a model family": Change(
        files={
            "models/dummy/__init__.py": "",
            "models/dummy/weights.py": (
                "from dataclasses import replace\nfrom megatron_fleet.models.llama import weights\n"
                'ARCHITECTURES = tuple(replace(a, model_types=("dummy",)) for a in weights.ARCHITECTURES)\n'
            ),
        },
        check="""
from megatron_fleet.models.registry import ARCHITECTURES
assert "dummy" in ARCHITECTURES
""",
    ),
    "a weight sync transport": Change(
        edits={
            "weight_sync/registry.py": (
                "TRANSPORTS: dict[str, TransportClasses] = {",
                'TRANSPORTS: dict[str, TransportClasses] = {"dummy": _ours("dummy", "Dummy", "Sender", "Engine"),',
            )
        },
        files={
            "weight_sync/dummy/__init__.py": "",
            "weight_sync/dummy/controller.py": (
                "from megatron_fleet.weight_sync.message.controller import MessageTransport\n\n\n"
                'class Dummy(MessageTransport):\n    name = "dummy"\n'
            ),
        },
        check="""
from megatron_fleet.weight_sync.registry import make_transport
assert make_transport(load("rollout.engine.transport=dummy").rollout.engine.transport).name == "dummy"
""",
    ),
    "a tool-call format": Change(
        edits={
            "models/qwen3/chat.py": (
                "FORMATS = {",
                'FORMATS = {"dummy": NamedFormat(QWEN3_TOKENS, (False,), lambda thinking, _: Qwen(False, thinking)),',
            )
        },
        check="""
from megatron_fleet.models.chat.detection import FORMATS
assert load("rollout.renderer=dummy").rollout.renderer in FORMATS
""",
    ),
    "an environment backend": Change(
        edits={
            "envs/registry.py": (
                "KINDS: Mapping[str, EnvironmentBackend] = MappingProxyType(\n    {",
                "from megatron_fleet.envs.dummy import Dummy\n\n"
                "KINDS: Mapping[str, EnvironmentBackend] = MappingProxyType(\n    {"
                '"dummy": EnvironmentBackend(lambda config, url, name, _: Dummy(config), _own_server),',
            ),
            "config/sections/env.py": (
                '        "python": EnvironmentKind(',
                '        "dummy": EnvironmentKind(tools=False),\n        "python": EnvironmentKind(',
            ),
        },
        files={
            "envs/dummy.py": "class Dummy:\n    def __init__(self, config):\n        self.config = config\n",
            "configs/env/dummy.yaml": "kind: dummy\n",
        },
        check="""
from megatron_fleet.envs.registry import KINDS
found = load("env=dummy", "data.tasks=tasks.json").env
assert type(KINDS[found.kind].open(found, "", "", "")).__name__ == "Dummy" and not found.about.tools
""",
    ),
    "when a checkpoint is saved": Change(
        edits={"checkpoint/saves.py": ("        return step == self._last_step or", "        return step == 3 or")},
        check="""
from megatron_fleet.checkpoint.saves import Saves
config = load("checkpoint.interval=0")
assert [step for step in range(9) if Saves(config.checkpoint, 8, None, None, None).due(step)] == [3]
""",
    ),
    "how timed-out episodes are counted": Change(
        edits={
            "agents/trajectory.py": ("Outcome.TIMEOUT: Cause.POLICY", "Outcome.TIMEOUT: Cause.ENVIRONMENT"),
            "telemetry/episodes.py": (
                '"trajectory_timeouts": _count(trajectories, Outcome.TIMEOUT)',
                '"trajectory_timeouts": 5 * _count(trajectories, Outcome.TIMEOUT)',
            ),
        },
        check="""
from megatron_fleet.agents.trajectory import CAUSES, Cause, Outcome
from megatron_fleet.telemetry import episodes
assert CAUSES[Outcome.TIMEOUT] is Cause.ENVIRONMENT
assert "5 * _count" in inspect.getsource(episodes)
""",
    ),
    "another launcher": Change(
        edits={
            "launch/launch_command.py": (
                "    launchers: dict[str, Launcher] = {",
                "    from megatron_fleet.launch.dummy import Dummy\n\n"
                '    launchers: dict[str, Launcher] = {"dummy": Dummy(),',
            ),
            "config/sections/launch.py": ('kind: Literal["local", ', 'kind: Literal["dummy", "local", '),
        },
        files={
            "launch/dummy.py": (
                "from megatron_fleet.launch.job import SCRIPTS\nfrom megatron_fleet.launch.local import Local\n\n\n"
                'class Dummy(Local):\n    kind = "dummy"\n\n    def program(self):\n'
                '        return [str(SCRIPTS / "dummy" / "train.sh")]\n'
            ),
            "../launch/dummy/train.sh": "#!/bin/bash\n",
            "configs/cluster/dummy.yaml": "# @package _global_\nlaunch:\n  kind: dummy\n",
        },
        check="""
from megatron_fleet.launch.launch_command import _launcher
launcher = _launcher(load("cluster=dummy").launch.kind)
assert launcher.kind == "dummy" and Path(*launcher.program()).is_file()
""",
    ),
    "more steps ahead of the trainer": Change(
        check='assert load("algorithm=importance_weighted", "rollout.max_staleness=5").rollout.max_staleness == 5'
    ),
    "a value of each trained token": Change(
        edits={
            "algorithms/batch.py": (
                "    extras = {} if trajectory.routing is None else",
                '    arrays["dummy"] = np.arange(len(trained), dtype=np.float32)\n'
                "    extras = {} if trajectory.routing is None else",
            ),
            "algorithms/policy_terms.py": (
                "POLICY_TERMS: dict[str, PolicyTerm] = {",
                'def reads(x, algorithm):\n    return x.array("dummy"), {}\n\n\n'
                'POLICY_TERMS: dict[str, PolicyTerm] = {"reads": reads,',
            ),
        },
        check="""
from megatron_fleet.algorithms.policy_terms import POLICY_TERMS
assert POLICY_TERMS["reads"](inputs(), None)[0].tolist() == [2, 3]
""",
    ),
    "a trainer, a hosted one for example": Change(
        edits={
            "trainer/registry.py": (
                "TRAINERS: dict[str, str] = {",
                'TRAINERS: dict[str, str] = {"dummy": "megatron_fleet.trainer.dummy:Dummy", ',
            ),
            "config/sections/trainer.py": (
                "NameOrPath((WITH_RANKS, HOSTED))",
                'NameOrPath((WITH_RANKS, HOSTED, "dummy"))',
            ),
        },
        files={
            "trainer/dummy.py": "class Dummy:\n    pass\n",
            "configs/trainer/dummy.yaml": (
                "# @package _global_\npolicy:\n  trainer: dummy\nrollout:\n  sampler: dummy\n"
            ),
        },
        check="""
from megatron_fleet.trainer.registry import trainer_factory
config = load("trainer=dummy")
assert trainer_factory(config.policy.trainer).__name__ == "Dummy" and config.ranks == 0
""",
    ),
    "a sampler of tokens": Change(
        edits={
            "rollout/sampler.py": (
                "SAMPLERS: dict[str, str] = {",
                'SAMPLERS: dict[str, str] = {"dummy": "megatron_fleet.rollout.dummy:Dummy", ',
            ),
            "config/sections/rollout.py": ("NameOrPath((VLLM, HOSTED))", 'NameOrPath((VLLM, HOSTED, "dummy"))'),
        },
        files={
            "rollout/dummy.py": (
                "from megatron_fleet.rollout.sampler import Sampler\n\n\nclass Dummy(Sampler):\n    pass\n"
            ),
            "configs/trainer/dummy.yaml": (
                "# @package _global_\npolicy:\n  trainer: dummy\nrollout:\n  sampler: dummy\n"
            ),
        },
        check="""
from megatron_fleet.rollout.sampler import sampler_class
assert sampler_class(load("trainer=dummy").rollout.sampler).__name__ == "Dummy"
""",
    ),
}
OPEN = {"images for the trainer"}
"""Rows that are not tested."""

PROGRAM = '''
import inspect, json, sys, traceback
from pathlib import Path
import numpy as np, torch
from megatron_fleet.agents.trajectory import Group, Outcome, Span, Trajectory
from megatron_fleet.algorithms.batch import build_data
from megatron_fleet.algorithms.explicit_losses import TrainedTokens
from megatron_fleet.config import validate
from megatron_fleet.config.load import load as compose
from megatron_fleet.config.schema import AlgorithmConfig
from megatron_fleet.trainer.packing.pack import pack_micro_batch
from megatron_fleet.trainer.megatron.step import loss_inputs

def load(*overrides):
    config = compose(["experiment=quickstart", *overrides])
    validate.check(config)
    return config

def played(sample, reward):
    mask = np.array([False, False, True, True])
    logprobs = np.where(mask, -1, 0).astype(np.float32)
    spans = (Span("prompt", 0, 2, 0), Span("action", 2, 4, 0, 0))
    ids, end = np.arange(4, dtype=np.int32), Outcome.COMPLETED
    return Trajectory("t", "e", 0, sample, ids, mask, logprobs, spans, reward, "", end)

def datum():
    """A sequence of four tokens, of which two are trained, as training makes it."""
    group = Group(0, "t", "e", [played(0, 1.0), played(1, 0.0)])
    made = build_data([group], AlgorithmConfig(advantage="grpo_no_std", reduction="constant")).data[0]
    made.scaled_advantages[2:] = 1
    return made

def inputs():
    return loss_inputs(pack_micro_batch([datum()], 8), (torch.zeros(2, requires_grad=True), torch.zeros(2)))

def tokens():
    return TrainedTokens.of([datum()], [np.zeros(4)])

failures = {}
for name, check in json.loads(sys.stdin.read()).items():
    try:
        exec(check, globals())
    except BaseException:
        failures[name] = traceback.format_exc()
print(json.dumps(failures))
'''


def place(name: str) -> Path:
    """Path of a file of the table in the repository."""
    return Path(name) if name.startswith("configs/") else Path("megatron_fleet", name)


@pytest.fixture(scope="module")
def failures(tmp_path_factory) -> dict[str, str]:
    """All dummies in one copy of the package: name → why its check fails."""
    copy = tmp_path_factory.mktemp("changes")
    for name in ("megatron_fleet", "configs", "launch", "assets"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for change in CHANGES.values():
        for name, (old, new) in change.edits.items():
            file = copy / place(name)
            text = file.read_text(encoding="utf-8")
            assert old in text, f"{name} has no {old!r} any more"
            file.write_text(text.replace(old, new), encoding="utf-8")
        for name, content in change.files.items():
            file = copy / place(name)
            file.parent.mkdir(exist_ok=True)
            file.write_text(content, encoding="utf-8")
    checks = json.dumps({name: change.check for name, change in CHANGES.items()})
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, input=checks, cwd=copy, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("name", CHANGES)
def test_a_dummy_works(failures, name):
    assert failures.get(name, "") == ""


@pytest.mark.parametrize("name", CHANGES)
def test_the_row_names_the_files_that_the_dummy_touches(name):
    row = ROWS[name].partition("(none, as")[0]
    row = re.sub(r";[^;|]* if .*", "", row)  # what only some of the kind touch
    named = {path.removeprefix("megatron_fleet/") for path in re.findall(r"`([\w/]+(?:\.py|/))`", row)}
    touched = {*CHANGES[name].edits, *(path.removeprefix("../") for path in CHANGES[name].files)}

    def covers(path: str, file: str) -> bool:
        file = re.sub(r"^models/\w+/chat\.py$", "models/FAMILY/chat.py", file)
        return file == path or (path.endswith("/") and file.startswith(path))

    if name == "more steps ahead of the trainer":
        assert not touched
        return
    alternatives = {"loop/update.py"} if name == "a value of each trained token" else set()
    implied = {"trainer/dummy.py", "rollout/dummy.py"} | ({"algorithms/policy_terms.py"} if alternatives else set())
    interfaces = {"trainer/base.py"}
    assert [f for f in touched if f not in implied and not any(covers(path, f) for path in named)] == []
    unused = [p for p in named - alternatives - interfaces if not any(covers(p, f) for f in touched)]
    assert [p for p in unused if p != "launch_command.py"] == []
    assert len({path for path in touched if not path.startswith(("configs/", "launch/dummy/"))}) <= MOST_FILES


def test_every_row_has_a_dummy():
    assert {*CHANGES} | OPEN == {*ROWS}

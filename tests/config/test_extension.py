"""Parts of a user's own: found, checked before anything starts, and refused in one sentence."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")  # of the losses

from megatron_fleet.agents.kinds import AGENTS
from megatron_fleet.algorithms.advantages import ADVANTAGES
from megatron_fleet.algorithms.groups import FILTERS, SHAPINGS
from megatron_fleet.algorithms.policy_terms import POLICY_TERMS
from megatron_fleet.config import extension
from megatron_fleet.config.errors import UserError
from megatron_fleet.config.extension import load
from megatron_fleet.config.keys import leaves
from megatron_fleet.config.load import load as load_config
from megatron_fleet.config.names import is_path
from megatron_fleet.envs.registry import KINDS
from megatron_fleet.preflight.own_parts import OWN_PARTS, check_own_part, interface
from megatron_fleet.rollout.sampler import SAMPLERS
from megatron_fleet.trainer.registry import TRAINERS

MODULE = """
import math

def two(a, b): return a + b
def one(a): return a
def more(a, b, *rest, named=1): return a
number = 5
async def later(a, b): return a
class Lazy:
    async def __call__(self, a, b): return a
Later = Lazy()
class Kept:
    def __init__(self, a, b): self.a = a
"""
BROKEN = {
    "raises_here": "raise RuntimeError('not\\x1b[0m today')",
    "leaves_here": "import sys; sys.exit(3)",
    "needs_more": "import no_such_package_anywhere",
    "no_python": "def f(:",
}
KEY = "algorithm.group_filter"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "mine_to_load.py").write_text(MODULE)
    for name, text in BROKEN.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    load.cache_clear()


@pytest.mark.parametrize("name", ["two", "more", "Kept"])
def test_what_takes_the_arguments_is_loaded(folder, name):
    assert load(interface(KEY), f"mine_to_load:{name}").__name__ == name


@pytest.mark.parametrize(
    ("path", "words"),
    [
        (
            "mine_to_load:one",
            r"must take \(group: Group, rewards: .*\): too many positional arguments",
        ),
        ("mine_to_load:number", r"number is not a function; name a function of \(group: Group"),
        ("mine_to_load:later", r"must not be an async function, as it is not awaited; correct it\.$"),
        ("mine_to_load:Later", "must not be an async function"),
        ("mine_to_load:nothing", "mine_to_load has no nothing"),
        ("not_there:f", "there is no module not_there in the current folder or on PYTHONPATH; add it"),
        ("not_there.at.all:f", "there is no module not_there "),
        ("mine_to_load.below:f", "importing mine_to_load.below raises ModuleNotFoundError|there is no module"),
        ("raises_here:f", r"importing raises_here raises RuntimeError: not"),
        ("leaves_here:f", "importing leaves_here raises SystemExit: 3"),
        ("needs_more:f", "importing needs_more raises ModuleNotFoundError: No module named 'no_such_package_anywhere'"),
        ("no_python:f", "importing no_python raises SyntaxError"),
    ],
)
def test_what_cannot_be_used_is_one_sentence(folder, path, words):
    with pytest.raises(UserError, match=f"^{KEY}={path}:? .*({words})"):
        load(interface(KEY), path)
    with pytest.raises(UserError, match=f"^{KEY}={path}:? .*({words})") as refusal:
        check_own_part(KEY, path)
    assert str(refusal.value).isprintable()


@pytest.mark.parametrize(
    ("key", "code", "words"),
    [
        ("agent.kind", "def own(a, b, c, d, e, f, g): ...", r"must be an async function, as it is awaited"),
        (
            "env.kind",
            "class own:\n  def __init__(self, a, b): ...\n  async def reset(self, t): ...",
            "no async method step",
        ),
    ],
)
def test_what_is_awaited_must_be_async(folder, key, code, words):
    name = key.replace(".", "_")
    (folder / f"{name}.py").write_text(code)
    with pytest.raises(UserError, match=f"^{key}={name}:own:? .*{words}"):
        load(interface(key), f"{name}:own")


def test_a_module_that_ends_python_is_refused(folder):
    (folder / "ends_python.py").write_text("import os; os._exit(2)")
    with pytest.raises(UserError, match=rf"^{KEY}=ends_python:f: importing it ends Python with status 2"):
        check_own_part(KEY, "ends_python:f")


@pytest.mark.slow
def test_a_module_that_never_ends_is_refused(folder, monkeypatch):
    (folder / "never_ends.py").write_text("while True: pass")
    monkeypatch.setattr(extension, "CHECK_TIMEOUT_S", 2.0)
    with pytest.raises(UserError, match=rf"^{KEY}=never_ends:f: importing it takes more than 2 s"):
        check_own_part(KEY, "never_ends:f")


@pytest.mark.parametrize("path", ["a:b", "a.b_c.d1:e", "_a:_b"])
def test_paths(path):
    assert is_path(path)


@pytest.mark.parametrize(
    "text", ["grpo", "a.b", "a:b:c", "a:", ":b", "a b:c", "1a:b", "a..b:c", "a:b.c", "ä:b", "a:b\n", ""]
)
def test_other_texts_are_no_paths(text):
    assert not is_path(text)


def test_a_key_takes_our_names_and_paths_and_nothing_else():
    base = ["model=tiny"]
    assert load_config([*base, "algorithm.loss=my.own_loss:term"]).algorithm.loss == "my.own_loss:term"
    with pytest.raises(
        UserError, match=r'^algorithm.loss="ppo": it must be one of ppo_clip, .* or package.module:name'
    ):
        load_config([*base, "algorithm.loss=ppo"])
    (accepted,) = (key.accepts for key in leaves() if key.name == "algorithm.advantage")
    assert accepted == f"one of {', '.join(ADVANTAGES)} or package.module:name"


def test_the_configuration_names_what_there_is():
    parts = {
        "algorithm.loss": POLICY_TERMS,
        "algorithm.advantage": ADVANTAGES,
        "algorithm.reward_shaping": SHAPINGS,
        "algorithm.group_filter": FILTERS,
        "agent.kind": AGENTS,
        "env.kind": KINDS,
        "env.reward": (),
        "rollout.renderer": ("auto", "a chat format of a family in megatron_fleet/models"),
        "rollout.engine.transport": ("auto", "a package of megatron_fleet/weight_sync"),
        "model.family": (),
        "policy.trainer": TRAINERS,
        "rollout.sampler": SAMPLERS,
        "logging.own": (),
    }
    there_are = {name: set(names) for name, names in parts.items()}
    offered = {key.name: key.accepts for key in leaves() if "package.module:name" in key.accepts}
    listed = {name: text.removesuffix(" or null") for name, text in offered.items()}
    listed = {name: text.removesuffix("package.module:name").removesuffix(" or ") for name, text in listed.items()}
    listed = {name: text.removeprefix("one of ").removeprefix("list of ") for name, text in listed.items()}
    assert {name: set(text.split(", ")) - {""} for name, text in listed.items()} == there_are
    assert offered.keys() == OWN_PARTS.keys()


def test_a_list_of_own_parts_takes_paths_only():
    base = ["model=tiny"]
    assert load_config([*base, "logging.own=[my.own_log:Log, other:Log]"]).logging.own == (
        "my.own_log:Log",
        "other:Log",
    )
    with pytest.raises(UserError, match=r'^logging\.own="tensorboard": it must be list of package\.module:name\.$'):
        load_config([*base, "logging.own=[tensorboard]"])
    (accepted,) = (key.accepts for key in leaves() if key.name == "logging.own")
    assert accepted == "list of package.module:name"


def test_every_part_declares_its_own_interface():
    assert {key: interface(key).key for key in OWN_PARTS} == {key: key for key in OWN_PARTS}

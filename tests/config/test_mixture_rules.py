"""Mixtures from the command line: a mapping is a value like others, and what cannot work is explained."""

import pytest

pytest.importorskip("hydra")

from megatron_fleet.config import keys, validate
from megatron_fleet.config.errors import UserError
from megatron_fleet.config.load import dump_resolved, load, load_resolved

MIXTURE = "data.mixture"


def check(*overrides: str):
    config = load(["experiment=quickstart", *(f"{MIXTURE}.{text}" for text in overrides)])
    validate.check(config)
    return config


def test_shares_are_a_mapping(tmp_path):
    config = check("weights=explicit", "shares={github: 2, a-b/c: 0.5}")
    assert config.data.mixture.shares == {"github": 2.0, "a-b/c": 0.5}
    file = tmp_path / "config.json"
    file.write_text(dump_resolved(config))
    assert load_resolved(file) == config
    assert load_resolved(file, [f'{MIXTURE}.shares={{"jira": 1}}']).data.mixture.shares == {"jira": 1.0}
    (key,) = [key for key in keys.leaves() if key.name == f"{MIXTURE}.shares"]
    assert (key.accepts, key.name in keys.texts()) == ("{name: number}", False)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["weights=temperature"], ["weights=temperature needs", f"{MIXTURE}.temperature=…"]),
        (["temperature=2"], [f"{MIXTURE}.temperature=2 has no effect", "weights=proportional"]),
        (["shares={a: 1}"], [f"{MIXTURE}.shares has no effect", "weights=proportional"]),
        (["weights=explicit"], ["weight above 0", f"{MIXTURE}.shares={{"]),
        (["weights=explicit", "shares={a: 0}"], ["weight above 0"]),
        (["weights=explicit", "shares={a: 1, b: -2}"], ["b has -2", "0 (left out) or above"]),
        (["weights=explicit", "shares={a: x}"], [f"{MIXTURE}.shares", '"x"']),
        (["shares.a=1"], [f"there is no key {MIXTURE}.shares.a"]),
        (["curriculum.floor=0.5"], ["curriculum.floor=0.5 has no effect", "signal_weights=false"]),
        (["curriculum.half_life=9"], ["half_life=9 has no effect"]),
        (["curriculum.prior=0.5"], ["prior=0.5 has no effect"]),
        (["curriculum.defer_passes=3"], ["defer_passes=3 has no effect", "defer_after=0"]),
        (["curriculum.floor=0"], ["curriculum.floor=0", "> 0"]),
    ],
)
def test_what_cannot_work_is_explained(overrides, words):
    with pytest.raises(UserError) as caught:
        check(*overrides)
    assert [word for word in words if word not in str(caught.value)] == []


def test_what_belongs_together_is_accepted():
    check("weights=temperature", "temperature=2", "min_per_env=1", "curriculum.signal_weights=true")
    check("curriculum.signal_weights=true", "curriculum.floor=0.5", "curriculum.prior=0.5", "curriculum.half_life=9")
    check("curriculum.defer_after=2", "curriculum.defer_passes=3")

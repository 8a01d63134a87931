"""The list of keys is whole, its reference is current, and misspelt keys find their way home."""

import re
from pathlib import Path

import pytest

from megatron_fleet.config import keys

REFERENCE = Path(__file__).parents[2] / "docs" / "reference" / "config.md"


def test_reference_is_current():
    assert REFERENCE.read_text(encoding="utf-8") == keys.reference(), "run python -m megatron_fleet.config.keys"


def test_the_reference_has_each_section_once():
    headings = [line for line in keys.reference().splitlines() if line.startswith("## ")]
    assert len(headings) == len(set(headings)) > 20


def test_every_key_has_a_meaning():
    assert [key.name for key in keys.leaves() if not key.description] == []


def test_no_value_is_called_null():
    described = {key.name: key.description for key in keys.leaves() if key.name in keys.nullable()}
    assert len(described) > 60
    assert {name: text for name, text in described.items() if re.search(r"none( =|:)", text.lower())} == {}


def test_sections_and_leaves_are_names():
    assert {"policy", "policy.optimizer", "policy.optimizer.lr"} <= keys.names()


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("lr", "policy.optimizer.lr"),
        ("optimizer.lr", "policy.optimizer.lr"),
        ("max_turn", "rollout.sampling.max_turns"),
        ("rollout.engine.kv_cache_byte", "rollout.engine.kv_cache_bytes"),
        ("eval.task", "eval.tasks"),
        ("zzzzzz", None),
    ],
)
def test_suggestion(typed, meant):
    assert keys.suggest(typed) == meant

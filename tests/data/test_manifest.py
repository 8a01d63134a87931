"""A split manifest reads back as it was written, and nothing else passes for one."""

import json

import pytest

from megatron_fleet.config.errors import UserError
from megatron_fleet.data.split import SplitManifest

MANIFEST = SplitManifest("tasks.json", "ab", {"eval_fraction": 0.2}, ["é"], ["b", "c"], ["d"], {"x": "y"})


def test_a_manifest_reads_back():
    assert SplitManifest.parse(MANIFEST.dump(), "m") == MANIFEST
    assert MANIFEST.sides() == {"é": "eval", "b": "train", "c": "train", "d": "retired"}


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"format": 2}, "another format"),
        ({"train": ["b", "é"]}, "task é is on two sides"),
        ({"retired": ["b"]}, "task b is on two sides"),
        ({"eval": "é"}, "eval is not a list"),
        ({"eval": [1]}, "eval is not a list"),
        ({"rules": []}, "rules"),
        ({"more": 1}, "more"),
    ],
)
def test_a_changed_manifest_is_refused(change, word):
    content = json.loads(MANIFEST.dump())
    with pytest.raises(UserError, match=word) as refused:
        SplitManifest.parse(json.dumps(content | change).encode(), "m.json")
    assert str(refused.value).startswith("m.json ")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 1}', "\xff", "[" * 100000])
def test_other_files_are_refused(text):
    with pytest.raises(UserError, match=r"^m\.json:? .*give the split\.json of a run"):
        SplitManifest.parse(text.encode("latin1"), "m.json")

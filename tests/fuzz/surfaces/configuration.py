"""Configurations: the ``config.json`` of a run, and overrides of it, judged by every rule; not composed by Hydra."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from fuzz import folders
from fuzz.engine import Surface
from fuzz.outcomes import refusal_of
from fuzz.trees import value_of

from megatron_fleet.config import keys, validate
from megatron_fleet.config.load import dump_resolved, load, load_resolved
from megatron_fleet.loop.dry_run import as_yaml, processes


@cache
def seeds() -> list[Any]:
    quick = ["experiment=quickstart", "run.out=/nowhere"]
    mixture = ["data.mixture.weights=temperature", "data.mixture.temperature=2"]
    tiny, mixed = (json.loads(dump_resolved(load(given))) for given in (quick, quick + mixture))
    overrides = ["run.steps=3", "policy.optimizer.lr=1e-2", "env.url=null", "data.tasks=embedded"]
    return [{"config.json": tree, "overrides": given} for tree in (tiny, mixed) for given in (overrides, [])]


def check(tree: Any, folder: Path) -> bool:
    files = dict(tree) if isinstance(tree, dict) else {}
    given = value_of(files.pop("overrides", []))
    overrides = [text for text in given if isinstance(text, str)] if isinstance(given, list) else []
    folders.write(folder, files)
    with refusal_of("config.json", "Override", "there is no key", *names_of_sections()):
        config = load_resolved(folder / "config.json", overrides)
        validate.check(config)
        json.loads(dump_resolved(config))
        as_yaml(config).encode()
        assert processes(config)
        return True
    return False


@cache
def names_of_sections() -> tuple[str, ...]:
    """Names that a sentence about a configuration may contain."""
    return tuple(sorted({leaf.name.partition(".")[0] for leaf in keys.leaves()}))


WORDS = ("run.steps=", "parallel.tensor=1000000007", "rollout.max_context=1e9", "a.b=c", "=", "null", "env.url=\ud800")
SURFACE = Surface("configuration", 200, seeds, check, words=WORDS)

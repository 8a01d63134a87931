"""Inputs that broke something once, and a fixed number of random ones on every surface; see the package."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("hydra")

from turns import in_turn

from fuzz import engine, trees
from fuzz.pending import PENDING

SURFACES = {surface.name: surface for surface in engine.surfaces()}
KNOWN = sorted(engine.CORPUS.glob("*/*.json"))
SEED = 0
MORE = "cd tests && python -m fuzz --inputs N --seed S"


@pytest.mark.parametrize("path", KNOWN, ids=[f"{path.parent.name}-{path.stem}" for path in KNOWN])
def test_what_broke_once_breaks_no_more(path: Path):
    finding = engine.attempt(SURFACES[path.parent.name], trees.from_text(path.read_text(encoding="utf-8")))
    assert finding is None, finding.told


@pytest.fixture(scope="module")
def share(request: pytest.FixtureRequest) -> int:
    """Divisor of the number of inputs: a third of them is tried, all with ``--nightly``."""
    return 1 if request.config.getoption("--nightly") else 3


@pytest.fixture(scope="module")
def tried(request: pytest.FixtureRequest, share: int) -> Iterator[list[str]]:
    """Surfaces whose random inputs were tried; at the end one line says how many inputs these were."""
    names: list[str] = []
    began = time.monotonic()
    yield names
    inputs, seconds = sum(SURFACES[name].count // share for name in names), time.monotonic() - began
    told = f"fuzz: {inputs} random inputs on {len(names)} surfaces in {seconds:.0f} s, seed {SEED}; more: {MORE}"
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print(f"\n{told}")


@pytest.mark.slow
@pytest.mark.parametrize("surface", in_turn(SURFACES.values()), ids=SURFACES)
def test_random_inputs(surface: engine.Surface, tried: list[str], share: int):
    tried.append(surface.name)
    found = [f for f in engine.run(surface, SEED, range(surface.count // share)) if f.place not in PENDING]
    assert not found, "\n\n".join(f"{engine.reproduction(f, SEED)}\n{f.told}" for f in found)


@pytest.mark.parametrize("surface", SURFACES.values(), ids=SURFACES)
def test_valid_inputs_are_taken(surface: engine.Surface, tmp_path: Path):
    """Else nothing behind the first check is reached."""
    for number, tree in enumerate(surface.seeds()):
        folder = tmp_path / str(number)
        folder.mkdir()
        assert surface.check(tree, folder), trees.to_text(tree)[:2000]
        assert trees.to_text(trees.from_text(trees.to_text(tree))) == trees.to_text(tree)

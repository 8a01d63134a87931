"""Tries inputs of a surface. An input follows from surface, seed and number alone, so any can be made again."""

from __future__ import annotations

import hashlib
import re
import shutil
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from random import Random
from typing import Any

import megatron_fleet
from fuzz import trees
from fuzz.mutation import Mutator
from fuzz.outcomes import Crashed, Hang, limited

CORPUS = Path(__file__).with_name("corpus")
PACKAGE = Path(megatron_fleet.__file__).parent
MOST_SHRINKING = 300
"""Smaller forms of a finding that are tried."""
AS_IT_IS = 20
"""One of so many inputs is a valid one."""


@dataclass(frozen=True)
class Surface:
    """One kind of input.

    Attributes:
        count: inputs that the tests try.
        seeds: makes valid inputs.
        check: hands an input to the program, in an empty folder of its own; raises for what may not happen. Whether the
            program took it: valid inputs are taken.
        words: that mean something to the program here.
    """

    name: str
    count: int
    seeds: Callable[[], Sequence[Any]]
    check: Callable[[Any, Path], bool]
    words: tuple[str, ...] = ()


@dataclass(frozen=True)
class Finding:
    """An input that broke something.

    Attributes:
        kind: the exception and where it came from; findings of one kind have one cause.
    """

    surface: str
    number: int
    kind: str
    told: str
    tree: Any

    @property
    def place(self) -> str:
        """Surface, and file where it came from."""
        return f"{self.surface}: " + re.sub(r".* at (.*):[0-9]*.*", r"\1", self.kind)


def surfaces() -> list[Surface]:
    """All of them, by name."""
    names = sorted(path.stem for path in (Path(__file__).parent / "surfaces").glob("*.py") if path.stem != "__init__")
    return [import_module(f"fuzz.surfaces.{name}").SURFACE for name in names]


def make(surface: Surface, seed: int, number: int) -> Any:
    """The input of that number."""
    random, seeds = Random(f"{surface.name} {seed} {number}"), surface.seeds()
    tree = random.choice(seeds)
    if number % AS_IT_IS == 0:
        return tree
    return Mutator(random, seeds, surface.words).mutated(tree)


def attempt(surface: Surface, tree: Any, number: int = -1) -> Finding | None:
    """Check one input."""
    with _folder() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with limited():
                surface.check(tree, folder)
        except KeyboardInterrupt:
            raise
        except (Exception, Hang, SystemExit) as error:
            return Finding(surface.name, number, _kind(error), "".join(traceback.format_exception(error)), tree)
        except BaseException as error:  # a panic of a library in Rust
            if type(error).__name__ != "PanicException":
                raise
            return Finding(surface.name, number, _kind(error), "".join(traceback.format_exception(error)), tree)
    return None


def run(surface: Surface, seed: int, numbers: Iterable[int]) -> list[Finding]:
    """Check inputs; the first finding of each kind."""
    found: dict[str, Finding] = {}
    for number in numbers:
        finding = attempt(surface, make(surface, seed, number), number)
        if finding is not None:
            found.setdefault(finding.kind, finding)
    return list(found.values())


def shrunk(surface: Surface, finding: Finding) -> Any:
    """A smaller input of the same kind of finding, by leaving out what can be left out."""
    tree, tried, progress = finding.tree, 0, True
    while progress and tried < MOST_SHRINKING and "Hang" not in finding.kind:
        progress = False
        for path, node in sorted(trees.nodes(tree), key=lambda item: len(item[0])):
            smaller = [trees.without(tree, path)] if path else []
            if isinstance(node, str | bytes) and len(node) > 8:
                smaller += [trees.replaced(tree, path, node[: len(node) // 2]), trees.replaced(tree, path, node[1:])]
            for candidate in smaller:
                tried += 1
                again = attempt(surface, candidate)
                if again is not None and again.kind == finding.kind:
                    tree, progress = candidate, True
                    break
            if progress or tried >= MOST_SHRINKING:
                break
    return tree


def save(surface: Surface, tree: Any) -> Path:
    """Put an input into the corpus, named by its content."""
    text = trees.to_text(tree).replace(str(CORPUS.parents[2]), "/nowhere")  # nothing of this machine
    path = CORPUS / surface.name / f"{hashlib.sha256(text.encode()).hexdigest()[:12]}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def reproduction(finding: Finding, seed: int) -> str:
    """The command that tries the input again."""
    return f"cd tests && python -m fuzz --surface {finding.surface} --seed {seed} --only {finding.number}"


def _kind(error: BaseException) -> str:
    """The exception, and the innermost line of the program itself that it came through."""
    if isinstance(error, Crashed):
        return error.kind
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if "/megatron_fleet/" in f.filename] or frames[-1:]
    where, file = own[-1], Path(own[-1].filename)
    name = file.relative_to(PACKAGE) if file.is_relative_to(PACKAGE) else file.name
    return f"{type(error).__name__} at {name}:{where.lineno} {where.name}"


@contextmanager
def _folder() -> Any:
    folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)

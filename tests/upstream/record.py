"""Record what we use of the packages of requirements/engine-gpu.lock, for tests where they are not installed.

    python tests/upstream/record.py FILE...

The files are archives of all `DISTRIBUTIONS`, in the versions of the lock files; `HOW` says how to get them. Needed
when a lock file or what we use has changed.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import re
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
if str(HERE.parent) not in sys.path:  # started as a program
    sys.path.insert(0, str(HERE.parent))

from import_graph import MODULES, ROOT  # noqa: E402
from upstream_engine_calls import Calls, called, engine_calls  # noqa: E402
from upstream_sources import Sources  # noqa: E402
from upstream_symbols import Missing, Symbol, Symbols, package_of  # noqa: E402
from upstream_uses import PACKAGES, Reader  # noqa: E402

RECORD = HERE / "gpu_packages.json"
DISTRIBUTIONS = (
    "fla-core", "flash-linear-attention", "megatron-core", "transformer-engine", "transformer-engine-torch", "triton",
    "vllm",
)  # fmt: skip
SOURCE_ONLY = "transformer-engine-torch"
MEGATRON = "megatron/core/"
ENVIRONMENT = re.compile(r"(?:CUDA|FLA|GLOO|NCCL|NVTE|PYTORCH|TORCH|TRITON|VLLM)_[A-Z0-9_]+")


HOW = """Record the releases in requirements/ as tests/upstream/gpu_packages.json:
  pip download --no-deps --only-binary :all: --python-version 3.12 --platform manylinux_2_28_x86_64 \\
    --platform manylinux_2_27_x86_64 --platform manylinux_2_24_x86_64 -d DIR {wheels}
  (and {source} from the package index's list of files; pip would try to build it)
  python tests/upstream/record.py DIR/*"""


class Record:
    """`Symbols` as they were recorded.

    Attributes:
        versions: distribution → version.
        environment: distribution → those of our environment variables that its sources name.
        attributes: name from `Reader.loose` → distributions whose sources have such an attribute.
        engine_calls: Megatron's calls of Transformer Engine, see `upstream_engine_calls`.
        symbols: name → fields of its `Symbol`.
    """

    def __init__(self, content: dict[str, dict[str, Any]]) -> None:
        self.versions = content["versions"]
        self.environment = content["environment"]
        self.attributes = content["attributes"]
        self.engine_calls: Calls = content["engine_calls"]
        self.symbols = content["symbols"]

    @classmethod
    def read(cls) -> Record:
        return cls(json.loads(RECORD.read_text(encoding="utf-8")))

    def has(self, package: str) -> bool:
        return package in PACKAGES

    def lookup(self, target: str) -> Symbol:
        if target not in self.symbols:
            raise Missing("new, or gone: it is not in tests/upstream/gpu_packages.json")
        return Symbol(*self.symbols[target])


class Recorder:
    """`Symbols` that keeps all answers."""

    def __init__(self, inner: Symbols) -> None:
        self._inner = inner
        self.found: dict[str, Symbol] = {}

    def has(self, package: str) -> bool:
        return self._inner.has(package)

    def lookup(self, target: str) -> Symbol:
        found = self._inner.lookup(target)
        if package_of(target) in PACKAGES:
            self.found[target] = found
        return found


@functools.cache
def variables() -> set[str]:
    """Environment variables of other projects that our code, or the installation, names."""
    found = re.findall(rf"\b{ENVIRONMENT.pattern}\b", (ROOT / "setup.sh").read_text(encoding="utf-8"))
    for path in MODULES.values():
        found += re.findall(rf'"({ENVIRONMENT.pattern})"', path.read_text(encoding="utf-8"))
    return set(found)


def locked() -> dict[str, str]:
    """Versions of `DISTRIBUTIONS` in the lock files of the GPU environment."""
    text = "".join((ROOT / "requirements" / f"{name}.lock").read_text() for name in ("engine-gpu", "engine-gpu-source"))
    found = dict(re.findall(r"^([\w.-]+)==([\w.]+)", text, re.MULTILINE))
    return {name: found[name] for name in DISTRIBUTIONS}


def python_files(archive: Path) -> Iterator[tuple[str, str]]:
    """Python files of a wheel or source archive, by their path in it without the outer folder of the latter."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            yield from ((name, wheel.read(name).decode()) for name in wheel.namelist() if name.endswith(".py"))
        return
    with tarfile.open(archive) as source:
        for member in source:
            file = source.extractfile(member) if member.name.endswith(".py") else None
            if file is not None:
                yield member.name.partition("/")[2], file.read().decode()


def release(archive: Path) -> tuple[str, str]:
    """Name and version in the name of an archive. Raises SystemExit for any other file."""
    match = re.fullmatch(r"(\w+)-([\w.]+?)(?:-.+\.whl|\.tar\.gz)", archive.name)
    if match is None:
        raise SystemExit(f"error: {archive} is neither a wheel nor a source archive (.tar.gz)")
    return match[1].replace("_", "-"), match[2]


def record(archives: list[Path]) -> dict[str, Any]:
    """The content of `RECORD`."""
    versions, wanted = dict(map(release, archives)), locked()
    if versions != wanted:
        missing = ", ".join(f"{name}=={version}" for name, version in wanted.items() if versions.get(name) != version)
        raise SystemExit(f"error: the lock files have {missing}; of these the files given are no archives\n{how()}")
    environment: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory() as top:
        for archive in archives:
            named: set[str] = set()
            for name, text in python_files(archive):
                path = Path(top, "packages", name)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")
                named |= variables().intersection(ENVIRONMENT.findall(text))
            environment[release(archive)[0]] = sorted(named)
        # Their classes derive from torch's, and of what is installed here only torch is of the same version.
        (torch,) = importlib.util.find_spec("torch").submodule_search_locations  # type: ignore[union-attr, misc]
        Path(top, "installed").mkdir()
        Path(top, "installed", "torch").symlink_to(torch)
        recorder = Recorder(Sources(Path(top, "packages"), Path(top, "installed")))
        reader = Reader(recorder)
        names = attributes_in(archives, reader.loose)
        calls = engine_calls(
            dict(each for archive in archives for each in python_files(archive) if MEGATRON in each[0])
        )
        for target in called(calls):
            with suppress(Missing):  # of another release than this one
                recorder.lookup(target)
    symbols = {target: [s.kind, s.parameters, s.holds] for target, s in sorted(recorder.found.items())}
    parts = {"versions": versions, "environment": environment, "attributes": names}
    return {**parts, "engine_calls": calls, "symbols": symbols}


def attributes_in(archives: list[Path], names: Collection[str]) -> dict[str, list[str]]:
    """Which distributions have attributes of these names: read, written, named in a string or declared in a class."""
    attribute = re.compile(rf"""(?:\.|["']|^ +(?:def )?)({"|".join(map(re.escape, names))})\b""", re.MULTILINE)
    found: dict[str, set[str]] = {name: set() for name in names}
    for archive in archives:
        for _, text in python_files(archive):
            for name in set(attribute.findall(text)):
                found[name].add(release(archive)[0])
    return {name: sorted(distributions) for name, distributions in found.items()}


def how() -> str:
    """What to do when `RECORD` is of other versions than `locked`."""
    pins = {name: f"{name}=={version}" for name, version in locked().items()}
    source = pins.pop(SOURCE_ONLY).replace("-", "_").replace("==", "-")
    return HOW.format(wheels=" ".join(pins.values()), source=f"{source}.tar.gz")


def main(archives: list[Path]) -> None:
    """Write `RECORD`, one name a line."""
    content = record(archives)
    parts = []
    for title, values in content.items():
        lines = ",\n".join(f"    {json.dumps(name)}: {json.dumps(value)}" for name, value in sorted(values.items()))
        parts.append(f"  {json.dumps(title)}: {{\n{lines}\n  }}")
    RECORD.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")
    print(f"{RECORD}: {len(content['symbols'])} names")


if __name__ == "__main__":
    main([Path(argument) for argument in sys.argv[1:]])

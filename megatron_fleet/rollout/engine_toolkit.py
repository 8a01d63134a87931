"""The CUDA toolkit with which an engine compiles kernels while it runs."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path


def toolkit_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables with which vLLM finds nvcc and ninja; none where the user chose a toolkit.

    FlashInfer and DeepGEMM compile kernels at their first use. They look for nvcc in CUDA_HOME, CUDA_PATH, PATH and
    /usr/local/cuda; without one vLLM does without FlashInfer, and DeepGEMM (FP8) cannot compile. What a host has there
    may be of another CUDA than torch, so engines get the compiler that is installed with torch; setup.sh gives it the
    names that the linker asks for.

    Args:
        environ: the environment of this process.
    """
    programs = {"PATH": f"{Path(sys.prefix) / 'bin'}{os.pathsep}{environ.get('PATH', os.defpath)}"}
    if environ.get("CUDA_HOME") or environ.get("CUDA_PATH"):
        return programs
    toolkit = Path(sysconfig.get_path("purelib")) / "nvidia" / "cu13"
    return programs | ({"CUDA_HOME": str(toolkit)} if (toolkit / "bin" / "nvcc").is_file() else {})

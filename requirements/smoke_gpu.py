"""Does the GPU engine environment work on this machine? Usage: python smoke_gpu.py [--driver no]

Prints what was verified, one line each; the first fault is one sentence, with exit status 1. ``--driver no`` leaves out
what needs a driver and a GPU.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import os
import subprocess
import sys
import sysconfig
import warnings
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

PACKAGES = {
    "megatron-core": "megatron.core.extensions.transformer_engine",
    "transformer-engine-torch": "transformer_engine.pytorch",
    "flash-linear-attention": "fla.ops.gated_delta_rule",
    "vllm": "vllm",
}
"""Package → the module of it whose import needs most of the others."""
KERNELS = (
    "vllm._C_stable_libtorch",
    "vllm._moe_C_stable_libtorch",
    "vllm.cumem_allocator",
    "vllm.vllm_flash_attn._vllm_fa3_C",
)
"""Compiled modules of vLLM, which are linked with the driver's library."""
FP8_KERNELS = "vllm.third_party.deep_gemm._C_extension"
"""Another one, in whose place FP8 engines take slower kernels, and which others do not need."""
DRIVER = "libcuda.so.1"
STAND_IN = "/usr/local/cuda/lib64/stubs/libcuda.so"
"""The toolkit's, of the same name: it has the driver's functions, which all fail."""


def refuse_cpu_torch() -> str:
    """Return torch's version. Raises SystemExit for a build without CUDA 13."""
    import torch

    if torch.version.cuda is None or not torch.version.cuda.startswith("13."):
        sys.exit(f"error: torch {torch.__version__} is built for {torch.version.cuda or 'CPUs'}, not for CUDA 13.")
    return f"torch {torch.__version__}, CUDA {torch.version.cuda}"


def imported(module: str) -> None:
    """Import it. Raises SystemExit."""
    try:
        importlib.import_module(module)
    except Exception as error:
        sys.exit(f"error: import {module}: {type(error).__name__}: {error}")


def check_kernels(library: str) -> list[str]:
    """Import the compiled modules of vLLM, with the driver's ``library``; return what was verified and what was not.

    Raises:
        SystemExit: one that every engine needs cannot be imported.
    """
    for module in KERNELS:
        imported(module)
    lines = [f"verified: the compiled modules of vLLM, with {library}"]
    try:
        importlib.import_module(FP8_KERNELS)
    except Exception as error:
        lines.append(f"not verified: DeepGEMM for FP8 engines: import {FP8_KERNELS}: {type(error).__name__}: {error}")
    return lines


def driver_library() -> str | None:
    """Load the driver's library, or the toolkit's stand-in for it; return its name."""
    for name in (DRIVER, STAND_IN):
        try:
            ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
        except OSError:
            continue
        return name
    return None


def check_compiler(libraries: list[str]) -> str:
    """Compile a kernel for Hopper and link it with ``libraries``, as FlashInfer does in an engine; return the compiler.

    Raises:
        SystemExit: one of the two fails.
    """
    own = Path(sysconfig.get_path("purelib")) / "nvidia" / "cu13"
    # As rollout/engine_toolkit.py, which an image does not have yet when its environments are made.
    home = Path(os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or own)
    with TemporaryDirectory() as folder:
        source, compiled = Path(folder, "kernel.cu"), Path(folder, "kernel.o")
        source.write_text("__global__ void nothing() {}\nvoid call() { nothing<<<1, 1>>>(); }\n")
        compile_ = [home / "bin" / "nvcc", "-arch=sm_90a", "-Xcompiler", "-fPIC", "-c", source, "-o", compiled]
        link = ["c++", "-shared", compiled, f"-L{home}/lib64", *libraries, "-o", Path(folder, "kernel.so")]
        for command in (compile_, link):
            try:
                subprocess.run(command, check=True, capture_output=True, text=True)
            except (OSError, subprocess.CalledProcessError) as error:
                said = getattr(error, "stderr", None) or str(error)
                sys.exit(f"error: vLLM cannot compile kernels with the toolkit {home}: {said.strip().splitlines()[0]}")
    return str(home / "bin" / "nvcc")


def check_devices() -> str:
    """Multiply matrices on every GPU and run one layer of Transformer Engine; return what the GPUs are."""
    import torch

    if not torch.cuda.is_available():
        sys.exit("error: torch finds no GPU; see nvidia-smi and CUDA_VISIBLE_DEVICES.")
    names = []
    for index in range(torch.cuda.device_count()):
        ones = torch.ones(256, 256, device=f"cuda:{index}", dtype=torch.bfloat16)
        if (ones @ ones).float().mean().item() != 256:
            sys.exit(f"error: GPU {index} multiplies wrongly.")
        names.append(torch.cuda.get_device_name(index))
    te = importlib.import_module("transformer_engine.pytorch")
    layer = te.Linear(256, 256, params_dtype=torch.bfloat16)
    layer(torch.ones(128, 256, device="cuda", dtype=torch.bfloat16)).float().sum().backward()
    if layer.weight.grad is None or not layer.weight.grad.isfinite().all():
        sys.exit("error: the gradient of Transformer Engine's linear layer is not finite.")
    return f"{len(names)} GPUs ({', '.join(sorted(set(names)))}): matrix product, Transformer Engine's linear layer"


def main() -> None:
    """Check and print. Raises SystemExit with the fault."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--driver", choices=("yes", "no"), default="yes")
    driver = parser.parse_args().driver == "yes"
    warnings.simplefilter("ignore")
    print("verified:", refuse_cpu_torch())
    library = driver_library()
    for package, module in PACKAGES.items():
        imported(module)
        print("verified:", package, version(package))
    if library:
        print(*check_kernels(library), sep="\n")
    else:
        print(f"not verified: the compiled modules of vLLM, which need {DRIVER}")
    print("verified:", check_compiler(["-lcudart", "-lcuda"] if driver else ["-lcudart"]))
    if driver:
        print("verified:", check_devices())
    else:
        print("not verified: what needs a driver and a GPU")


if __name__ == "__main__":
    main()

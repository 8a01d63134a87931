"""Does the GPU engine environment work on this machine? Usage: python smoke_gpu.py [--driver no]

Prints what was verified, one line each; the first fault is one sentence, with exit status 1. ``--driver no`` leaves out
what needs a driver and a GPU.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import warnings
from importlib.metadata import version


def refuse_cpu_torch() -> str:
    """Return torch's version. Raises SystemExit for a build without CUDA 13."""
    import torch

    if torch.version.cuda is None or not torch.version.cuda.startswith("13."):
        sys.exit(f"error: torch {torch.__version__} is built for {torch.version.cuda or 'CPUs'}, not for CUDA 13.")
    return f"torch {torch.__version__}, CUDA {torch.version.cuda}"


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
    for package in ("megatron-core", "vllm", "transformer-engine-torch", "flash-linear-attention"):
        print("verified: installed", package, version(package))
    if driver:
        print("verified:", check_devices())
    else:
        print("not verified: what needs a driver and a GPU")


if __name__ == "__main__":
    main()

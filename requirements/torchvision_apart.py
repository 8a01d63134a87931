"""Put torchvision into a folder of its own, PREFIX/torchvision, where torch is a CPU build.

PyPI's builds of torchvision have their C++ operators for CUDA only. Image processors use its Python half, which imports
once the two operators are declared that it describes unasked. It is kept apart because every import of transformers
would load it from the common folder; an engine whose model sees finds it here (``rollout.engine_images``).

Usage: python requirements/torchvision_apart.py
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

DECLARATION = """

if not _has_ops():
    for _name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{_name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""


def main() -> None:
    """Install anew what requirements/engine-torchvision.txt names. Raises CalledProcessError."""
    target = Path(sys.prefix) / "torchvision"
    shutil.rmtree(target, ignore_errors=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-qq", "--no-deps"]
    subprocess.run([*pip, "--target", target, "-r", Path(__file__).with_name("engine-torchvision.txt")], check=True)
    with (target / "torchvision" / "extension.py").open("a") as extension:
        extension.write(DECLARATION)


if __name__ == "__main__":
    main()

"""Is this Python environment whole? Usage: python verify.py [MODULE…]

Every file that an installed package lists must exist (an interrupted installation leaves holes), every module named
must import.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from importlib.metadata import distributions


def main(modules: list[str]) -> int:
    """Print what is wrong; the exit status says whether anything is."""
    problems = []
    warnings.simplefilter("ignore")  # Megatron-Core tells at every import which CUDA packages it does without
    for distribution in distributions():
        name = distribution.metadata["Name"] or str(distribution)
        files = [f for f in distribution.files or [] if f.suffix != ".pyc"]
        if not files:
            problems.append(f"{name}: its list of files is missing")
        elif missing := [f for f in files if not f.locate().exists()]:
            problems.append(f"{name}: {missing[0]} is missing")
    for module in modules:
        try:
            importlib.import_module(module)
        except Exception as error:
            problems.append(f"import {module}: {type(error).__name__}: {error}")
    print(*problems, sep="\n", end="\n" if problems else "", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

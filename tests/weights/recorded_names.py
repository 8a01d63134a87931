"""Names of weights in the releases of Megatron-Core: ``tools/megatron_names.py`` as a module.

``megatron_names.read("0.16.1")["qwen3", "te"].tensors`` are the tensors of a checkpoint, and so on.
"""

import importlib.util
import sys
from pathlib import Path

_FILE = Path(__file__).parents[2] / "tools" / "megatron_names.py"
_spec = importlib.util.spec_from_file_location("megatron_names_tool", _FILE)
assert _spec and _spec.loader
megatron_names = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = megatron_names
_spec.loader.exec_module(megatron_names)

VERSIONS = sorted(path.stem for path in megatron_names.RECORDS.glob("*.json"))

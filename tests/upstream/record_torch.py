"""Record what an older release of PyTorch lacks of the one installed here, as torch_lacks.json beside this file.

    python tests/upstream/record_torch.py PYTHON

PYTHON is an interpreter with the older release: the oldest with which training has to work. Its answers do not depend
on what our code uses, so a new use needs no new record.
"""

from __future__ import annotations

import contextlib
import enum
import importlib
import inspect
import io
import json
import pkgutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RECORD = Path(__file__).parent / "torch_lacks.json"
HEAVY = (
    *("torch.testing", "torch.onnx", "torch.export", "torch.ao", "torch.fx", "torch.utils.data.datapipes"),
    *("torch.utils.bottleneck", "torch.utils.hipify", "torch.utils.model_dump", "torch.utils.tensorboard"),
)
"""Modules that are not looked at: nothing of ours is like them, and importing them takes packages or minutes."""
Names = dict[str, list[str] | None]
"""Dotted name → names of its parameters; ``None`` where they are not known, or it cannot be called."""


def names() -> Names:
    """Public names of the PyTorch of this process, and all methods of its tensors."""
    import torch

    found: Names = {f"torch.Tensor.{name}": parameters(getattr(torch.Tensor, name)) for name in dir(torch.Tensor)}
    for module in modules():
        for name, value in inspect.getmembers(module):
            home = getattr(value, "__module__", None) or "torch"
            if name.startswith("_") or inspect.ismodule(value) or not str(home).startswith("torch"):
                continue
            if isinstance(value, enum.EnumMeta | type(torch.FloatTensor)):
                continue  # Python's own, or the same methods as Tensor's
            found[f"{module.__name__}.{name}"] = parameters(value)
            if inspect.isclass(value) and home == module.__name__:
                members = ((key, member) for key, member in vars(value).items() if not key.startswith("_"))
                found |= {f"{module.__name__}.{name}.{key}": parameters(member) for key, member in members}
    return found


def modules() -> Iterator[Any]:
    """Public modules of torch that can be imported here."""
    import torch

    yield torch
    for each in pkgutil.walk_packages(torch.__path__, "torch.", onerror=lambda _: None):
        if "._" in each.name or each.name.startswith(HEAVY) or each.name.endswith("__main__"):
            continue
        with contextlib.suppress(BaseException), contextlib.redirect_stdout(io.StringIO()):
            yield importlib.import_module(each.name)


def parameters(function: Any) -> list[str] | None:
    """Names of a function's parameters; those of all overloads where it is an operator written in C++."""
    import torch

    if not callable(function):
        return None
    with contextlib.suppress(TypeError, ValueError):
        found = inspect.signature(function).parameters.values()
        # Whatever takes any keyword fits every call.
        return None if any(each.kind is each.VAR_KEYWORD for each in found) else [each.name for each in found]
    with contextlib.suppress(RuntimeError, AttributeError):
        schemas = torch._C._jit_get_schemas_for_operator(f"aten::{function.__name__}")
        return sorted({each.name for schema in schemas for each in schema.arguments}) or None
    return None


def lacking(old: Names, new: Names) -> Names:
    """Name → parameters that only ``new`` has; ``None`` where ``old`` does not have the name at all."""
    found: Names = {name: None for name in new if name not in old}
    for name, has in new.items():
        before = old.get(name)
        if has is not None and before is not None and (more := sorted(set(has) - set(before))):
            found[name] = more
    return found


def describe() -> None:
    """Print version and names of this process's PyTorch as JSON."""
    import torch

    warnings.filterwarnings("ignore")
    print(json.dumps([torch.__version__, names()]))


def main(python: str) -> None:
    """Write the record."""
    answers = []
    for each in (python, sys.executable):
        done = subprocess.run([each, __file__, "--describe"], stdout=subprocess.PIPE, check=True, text=True)
        answers.append(json.loads(done.stdout.splitlines()[-1]))
    (old_version, old), (new_version, new) = answers
    found = lacking(old, new)
    lines = ",\n".join(f"    {json.dumps(name)}: {json.dumps(found[name])}" for name in sorted(found))
    versions = json.dumps([version.partition("+")[0] for version in (old_version, new_version)])
    RECORD.write_text(f'{{\n  "versions": {versions},\n  "lacks": {{\n{lines}\n  }}\n}}\n', encoding="utf-8")
    print(f"{RECORD.name}: {old_version} lacks {len(found)} names or parameters of {new_version}")


if __name__ == "__main__":
    describe() if sys.argv[1] == "--describe" else main(sys.argv[1])

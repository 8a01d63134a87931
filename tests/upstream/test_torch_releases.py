"""Our code also runs on the oldest PyTorch that training has to work with.

Every name of torch that we use, and every keyword that we pass, is compared with what that release lacks of the one
installed here (`record_torch`). Uses that ask first, such as ``getattr(torch, name)`` or ``**more``, are not seen.
"""

from __future__ import annotations

import ast
import importlib.metadata
import json
from collections.abc import Iterator

import pytest

pytest.importorskip("torch")

import torch
from record_torch import RECORD, Names
from upstream_uses import READ

LACKS: Names = json.loads(RECORD.read_text(encoding="utf-8"))["lacks"]
OLD, NEW = json.loads(RECORD.read_text(encoding="utf-8"))["versions"]
GUARDED: set[tuple[str, str]] = set()
"""(our module, the name) of uses that are only reached with a newer release."""


def torch_uses(tree: ast.AST) -> Iterator[tuple[int, str, set[str]]]:
    """(line, dotted name, keywords) of each use of a name of torch, and of each method that tensors have."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {a.asname or "torch": a.name if a.asname else "torch" for a in node.names if _of_torch(a.name)}
        elif isinstance(node, ast.ImportFrom) and _of_torch(node.module or ""):
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                yield node.lineno, f"{node.module}.{alias.name}", set()
    called = {id(node.func): {k.arg for k in node.keywords if k.arg} for node in ast.walk(tree) if _is_call(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Name):
            first, *rest = ast.unparse(node).split(".")
            keywords = called.get(id(node), set())
            if first in names and all(part.isidentifier() for part in rest):
                yield node.lineno, ".".join([names[first], *rest]), keywords
            elif isinstance(node, ast.Attribute) and hasattr(torch.Tensor, node.attr):
                yield node.lineno, f"torch.Tensor.{node.attr}", keywords


def _is_call(node: ast.AST) -> bool:
    return isinstance(node, ast.Call)


def _of_torch(module: str) -> bool:
    return module.partition(".")[0] == "torch"


def lacking(text: str) -> list[tuple[int, str, str]]:
    """(line, name, what is wrong) of uses that the older release does not have."""
    found = []
    for line, name, keywords in torch_uses(ast.parse(text)):
        if name in LACKS:
            gone = LACKS[name]
            unknown = keywords & set(gone or ())
            if gone is None or unknown:
                found.append((line, name, "the name" if gone is None else ", ".join(sorted(unknown))))
    return found


def test_what_we_use_is_in_the_oldest_release():
    found = {
        (module, name): f"{module}:{line}: PyTorch {OLD} lacks {what} of {name}"
        for module, path in READ.items()
        for line, name, what in lacking(path.read_text(encoding="utf-8"))
    }
    assert [reason for key, reason in found.items() if key not in GUARDED] == []
    assert GUARDED - found.keys() == set()


def test_the_record_is_of_the_installed_release():
    here = importlib.metadata.version("torch").partition("+")[0]
    assert here == NEW, "python tests/upstream/record_torch.py PYTHON, of an environment with the older release"
    assert LACKS["torch.nn.attention.varlen.varlen_attn"] and LACKS["torch.nn.attention.varlen.varlen_attn_out"] is None


@pytest.mark.parametrize(
    "text",
    [
        "from torch.nn.attention.varlen import varlen_attn\nvarlen_attn(q, k, v, enable_gqa=True)",
        "from torch.nn.attention import varlen\nvarlen.varlen_attn(q, k, v, scale=1, enable_gqa=grouped)",
        "import torch\ntorch.nn.attention.varlen.varlen_attn_out",
        "import torch.nn.attention.varlen as kernels\nkernels.varlen_attn_out(q)",
        "from torch.nn.attention.varlen import varlen_attn_out",
        "x.const_data_ptr()",
    ],
)
def test_uses_are_found(text):
    assert lacking(text)


def test_what_both_releases_have_is_accepted():
    assert lacking("import torch.nn.functional as F\nF.scaled_dot_product_attention(q, k, v, enable_gqa=True)") == []

"""Keywords that Megatron-Core's own code passes to Transformer Engine: each follows its own releases."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

from upstream_symbols import Missing, Symbols

ENGINE = "transformer_engine"
Calls = dict[str, list[str]]
"""``file:line`` and the called name → keywords written in the call."""


def engine_calls(files: Mapping[str, str]) -> Calls:
    """Find the calls of Transformer Engine's functions and classes, and of its constructors by ``super()``.

    Keywords from a dictionary (``**more``) are left out: Megatron fills it by the release that it finds.

    Args:
        files: path → text of Megatron's Python files.
    """
    found: Calls = {}
    for path, text in sorted(files.items()):
        if ENGINE in text:
            tree = ast.parse(text)
            names = dict(_imports(tree))
            for where, target, keywords in _calls(tree, names):
                found[f"{path}:{where} {target}"] = keywords
    return found


def called(calls: Calls) -> set[str]:
    """Names of the functions and classes that are called."""
    return {where.split(" ")[1] for where in calls}


def misfits(calls: Calls, engine: Symbols) -> dict[str, list[str]]:
    """Called name → keywords that Transformer Engine does not take there."""
    found: dict[str, list[str]] = {}
    for where, keywords in calls.items():
        target = where.split(" ")[1]
        try:
            signature = engine.lookup(target).signature
        except Missing:
            continue  # of another release; Megatron asks for the version first
        if signature is None or any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values()):
            continue
        if unknown := sorted(set(keywords) - set(signature.parameters)):
            found[target] = unknown
    return found


def _imports(tree: ast.AST) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] == ENGINE:
                    yield alias.asname or ENGINE, alias.name if alias.asname else ENGINE
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == ENGINE:
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}:{alias.name}"


def _calls(tree: ast.AST, names: Mapping[str, str]) -> Iterator[tuple[int, str, list[str]]]:
    bases = {
        id(call): target
        for cls in ast.walk(tree)
        if isinstance(cls, ast.ClassDef)
        and (target := next(filter(None, (_target(b, names) for b in cls.bases)), None))
        for call in ast.walk(cls)
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "super().__init__"
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (target := bases.get(id(node)) or _target(node.func, names)):
            yield node.lineno, target, sorted(k.arg for k in node.keywords if k.arg)


def _target(node: ast.AST, names: Mapping[str, str]) -> str | None:
    """Name of Transformer Engine's that an expression stands for, such as ``transformer_engine.pytorch:Linear``."""
    first, *rest = ast.unparse(node).split(".")
    if first not in names or not all(part.isidentifier() for part in rest):
        return None
    if ":" in names[first]:
        return ".".join([names[first], *rest])
    *modules, last = [*names[first].split("."), *rest]
    return f"{'.'.join(modules)}:{last}"

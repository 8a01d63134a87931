"""Who imports whom, read from the source: for the rules about imports, and to find the tests of a change."""

from __future__ import annotations

import ast
from collections.abc import Container, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "megatron_fleet"
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}
"""Our modules by name."""


def imports(module: str, *, whole: bool = True) -> Iterator[str]:
    """Modules that ``module`` imports: ours resolved to files that exist, others by their name.

    ``whole=False`` leaves out what functions import when called and what only the type checker sees.
    """
    tree = ast.parse(MODULES[module].read_text(encoding="utf-8"))
    for node in import_statements(tree, whole=whole):
        assert isinstance(node, ast.Import) or node.level == 0, f"{module}: relative import"
        yield from imported(node)


def imported(node: ast.Import | ast.ImportFrom, known: Container[str] = MODULES) -> Iterator[str]:
    """The modules that a statement names. ``known``: names of those that ``from PACKAGE import`` may mean."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif node.module:
        names = [f"{node.module}.{alias.name}" for alias in node.names]
        yield from (name if name in known else node.module for name in names)


def import_statements(tree: ast.AST, *, whole: bool = True) -> Iterator[ast.Import | ast.ImportFrom]:
    """The import statements of a file; ``whole`` as in `imports`."""
    pending = [tree]
    while pending:
        node = pending.pop()
        if not whole and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING" and not whole:
            pending.extend(node.orelse)
            continue
        pending.extend(ast.iter_child_nodes(node))
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node

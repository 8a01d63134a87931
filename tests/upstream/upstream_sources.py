"""Names of other packages, read from their sources without importing them: CUDA branches cannot be imported here."""

from __future__ import annotations

import ast
import functools
import inspect
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from upstream_symbols import Missing, Symbol, package_of, signature, written

Function = ast.FunctionDef | ast.AsyncFunctionDef
PLAIN = {"dataclass", "config"}
"""Decorators that generate a constructor from the annotated fields; ``config`` is vLLM's."""
RECORDS = {"NamedTuple", "TypedDict", "Struct", "BaseModel", "Protocol"}
CONTAINERS = {"list", "List", "Sequence", "Iterable", "Iterator", "tuple", "Tuple", "AsyncGenerator", "AsyncIterator"}
TRANSPARENT = {"Optional", "Annotated", "Final", "Awaitable"}


@dataclass(frozen=True, slots=True)
class Definition:
    """What a name stands for.

    Attributes:
        module: where it is defined.
        node: its statement; ``None`` for a module, or for something whose source says nothing about it.
        path: its name within the module, with ``()`` and ``[]``.
        owner: class of a method or field.
        known: whether a missing attribute is certain to be missing.
    """

    module: str
    path: str
    node: ast.AST | None = field(compare=False)
    owner: Definition | None = field(default=None, compare=False)
    known: bool = True

    def __str__(self) -> str:
        return f"{self.module}:{self.path}" if self.path else self.module


class Sources:
    """`Symbols` of the packages below folders like ``site-packages``; each package comes from the first that has it."""

    def __init__(self, *roots: Path) -> None:
        self._roots = roots

    def has(self, package: str) -> bool:
        return self._root(package) is not None

    @functools.cache  # noqa: B019
    def lookup(self, target: str) -> Symbol:
        found = self.find(target)
        if not found.known:
            return Symbol("unknown")
        if not found.path:
            return Symbol("module", holds=found.module)
        parameters = self.signature(found)
        text = None if parameters is None else written(parameters)
        if isinstance(found.node, ast.ClassDef):
            return Symbol("class", text)
        callable_ = isinstance(found.node, Function) and not _is_property(found.node)
        held = self.result(found) if callable_ else self.value(found)
        return Symbol("function" if callable_ else "value", text, None if held is None else str(held))

    @functools.cache  # noqa: B019
    def _root(self, package: str) -> Path | None:
        return next((r for r in self._roots if (r / package).is_dir() or (r / f"{package}.py").is_file()), None)

    @functools.cache  # noqa: B019
    def file(self, module: str) -> Path | None:
        """The file of a module, if it has one."""
        root = self._root(package_of(module))
        base = None if root is None else root.joinpath(*module.split("."))
        candidates = () if base is None else (base / "__init__.py", base.with_suffix(".py"))
        return next((path for path in candidates if path.is_file()), None)

    def _is_module(self, name: str) -> bool:
        root = self._root(package_of(name))
        return root is not None and (self.file(name) is not None or root.joinpath(*name.split(".")).is_dir())

    @functools.cache  # noqa: B019
    def _bindings(self, module: str) -> dict[str, list[ast.AST]]:
        path = self.file(module)
        if path is None:
            raise Missing(f"there is no module {module}")
        found: dict[str, list[ast.AST]] = {}
        for name, node in _bound(ast.parse(path.read_text(encoding="utf-8")).body):
            found.setdefault(name, []).append(node)
        return found

    def find(self, target: str) -> Definition:
        """Look up a name, through imports and base classes. Raises Missing."""
        module, _, path = target.partition(":")
        if not self._is_module(module):
            raise Missing(f"there is no module {module}")
        here = Definition(module, "", None)
        for part in re.findall(r"\w+|\(\)", path):
            here = self.member(here, part)
        return here

    def member(self, of: Definition, name: str) -> Definition:
        """An attribute; for a class also ``()``, an instance."""
        if of.known and not of.path:
            return self._in_module(of.module, name)
        if of.known and isinstance(of.node, ast.ClassDef):
            return Definition(of.module, f"{of.path}()", of.node) if name == "()" else self._in_class(of, name)
        return Definition(of.module, f"{of.path}.{name}", None, known=False)

    def _in_module(self, module: str, name: str, seen: frozenset[tuple[str, str]] = frozenset()) -> Definition:
        if (module, name) in seen:
            raise Missing(f"{module} has no {name}")
        seen |= {(module, name)}
        if self.file(module) is None:
            return self.find(f"{module}.{name}")
        bindings = self._bindings(module)
        candidates = sorted(bindings.get(name, ()), key=lambda node: not isinstance(node, ast.ClassDef | Function))
        for node in candidates:
            if not isinstance(node, ast.ImportFrom | ast.Import):
                return Definition(module, name, node)
            try:
                return self._imported(module, node, name, seen)
            except Missing:
                continue
        for node in bindings.get("*", ()):
            assert isinstance(node, ast.ImportFrom)
            try:
                return self._in_module(self._absolute(module, node), name, seen)
            except Missing:
                continue
        if self._is_module(f"{module}.{name}"):
            return Definition(f"{module}.{name}", "", None)
        if candidates:  # bound, by an import from a package whose sources are not at hand
            return Definition(module, name, None, known=False)
        raise Missing(f"{module} has no {name}")

    def _imported(
        self, module: str, node: ast.ImportFrom | ast.Import, name: str, seen: frozenset[tuple[str, str]]
    ) -> Definition:
        for alias in node.names:
            if (alias.asname or alias.name) == name or (
                isinstance(node, ast.Import) and alias.asname is None and alias.name.split(".")[0] == name
            ):
                if isinstance(node, ast.Import):
                    return self.find(alias.name if alias.asname else name)
                return self._in_module(self._absolute(module, node), alias.name, seen)
        raise Missing(name)

    def _absolute(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        path = self.file(module)
        base = module.split(".")
        up = node.level - (1 if path is not None and path.name == "__init__.py" else 0)
        return ".".join([*base[: len(base) - up], *([node.module] if node.module else [])])

    def lineage(self, cls: Definition) -> Iterator[tuple[Definition, bool]]:
        """A class and its bases, depth first; with each, whether its own bases are all known."""
        assert isinstance(cls.node, ast.ClassDef)
        bases, complete = [], True
        for base in cls.node.bases:
            inner = base.value if isinstance(base, ast.Subscript) else base
            if ast.unparse(inner).split(".")[-1] in {*RECORDS, "Generic", "ABC", "object", "Enum", "Exception"}:
                continue
            found = self.expression(cls.module, inner)
            if found is not None and isinstance(found.node, ast.ClassDef):
                bases.append(found)
            else:
                complete = False
        yield Definition(cls.module, cls.path.removesuffix("()"), cls.node), complete
        for found in bases:
            yield from self.lineage(found)

    def _in_class(self, cls: Definition, name: str) -> Definition:
        instance = cls.path.endswith("()")
        known = True
        for each, complete in self.lineage(cls):
            known &= complete
            node = _class_member(each.node, name)
            if node is not None:
                return Definition(each.module, f"{each.path}{'()' if instance else ''}.{name}", node, owner=each)
        if known and not name.startswith("__"):
            raise Missing(f"{cls} has no {name}")
        return Definition(cls.module, f"{cls.path}.{name}", None, known=False)

    def expression(self, module: str, node: ast.AST) -> Definition | None:
        """What a dotted name stands for inside ``module``; ``None`` if its source is not at hand."""
        try:
            parts = ast.unparse(node).split(".")
            here = self._in_module(module, parts[0])
            for part in parts[1:]:
                here = self.member(here, part)
            return here
        except (Missing, SyntaxError):
            return None

    def value(self, of: Definition) -> Definition | None:
        """Instance that a field, property or module variable holds, by its annotation."""
        node = of.node
        if isinstance(node, ast.AnnAssign):
            return self.annotated(of.module, node.annotation)
        if isinstance(node, Function) and _is_property(node):
            return self.annotated(of.module, node.returns)
        if isinstance(node, ast.arg):
            return self.annotated(of.module, node.annotation)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            made = self.expression(of.module, node.value.func)
            return self.member(made, "()") if made is not None and isinstance(made.node, ast.ClassDef) else None
        return None

    def result(self, of: Definition) -> Definition | None:
        """Instance that a call returns."""
        if isinstance(of.node, ast.ClassDef):
            return self.member(of, "()")
        if not isinstance(of.node, Function) or of.node.returns is None:
            return None
        if ast.unparse(of.node.returns).strip("'\"") == "Self" and of.owner is not None:
            return self.member(of.owner, "()")
        return self.annotated(of.module, of.node.returns)

    def annotated(self, module: str, annotation: ast.AST | None) -> Definition | None:
        """Instance of an annotation's class; of a container's items, with ``[]`` at the end of its path."""
        match annotation:
            case ast.Constant(value=str(text)):
                return self.annotated(module, ast.parse(text, mode="eval").body)
            case ast.BinOp(op=ast.BitOr()):
                sides = [self.annotated(module, side) for side in (annotation.left, annotation.right)]
                return next((side for side in sides if side is not None), None)
            case ast.Subscript():
                outer = ast.unparse(annotation.value).split(".")[-1]
                inner = annotation.slice.elts[0] if isinstance(annotation.slice, ast.Tuple) else annotation.slice
                found = self.annotated(module, inner) if outer in CONTAINERS | TRANSPARENT else None
                if found is None or outer in TRANSPARENT:
                    return found
                return Definition(found.module, f"{found.path}[]", found.node, known=found.known)
            case ast.Name() | ast.Attribute():
                found = self.expression(module, annotation)
                return self.member(found, "()") if found and isinstance(found.node, ast.ClassDef) else None
        return None

    def signature(self, of: Definition) -> inspect.Signature | None:
        """Parameters of a call, without a bound first one; ``None`` if the source does not tell."""
        if isinstance(of.node, ast.ClassDef):
            return self._constructor(of)
        if not isinstance(of.node, Function):
            return None
        decorators = {ast.unparse(each).split("(")[0].split(".")[-1] for each in of.node.decorator_list}
        if _is_property(of.node):
            return None
        bound = of.owner is not None and "staticmethod" not in decorators
        drop = bound and (of.path.rpartition(".")[0].endswith("()") or "classmethod" in decorators)
        return signature(of.node.args, drop_first=drop)

    def _constructor(self, cls: Definition) -> inspect.Signature | None:
        lineage = list(self.lineage(cls))
        for index, (each, complete) in enumerate(lineage):
            init = _class_member(each.node, "__init__")
            if isinstance(init, Function):
                return signature(init.args, drop_first=True)
            if _is_dataclass(each.node) or _is_record(each.node):
                # Classes derived from a record are records; those derived from a dataclass only with the decorator.
                fields = lineage[index if _is_dataclass(each.node) else 0 :]
                found: dict[str, inspect.Parameter] = {}
                for base, _ in reversed(fields):
                    found |= _fields(base.node) if _is_record(each.node) or _is_dataclass(base.node) else {}
                ordered = sorted(found.values(), key=lambda p: (p.kind, p.default is not inspect.Parameter.empty))
                return inspect.Signature(ordered)
            if not complete:
                return None
        return inspect.Signature()


def _is_property(node: Function) -> bool:
    return any("property" in ast.unparse(each) for each in node.decorator_list)


def _bound(body: Sequence[ast.stmt]) -> Iterator[tuple[str, ast.AST]]:
    """Names bound at the top of a module, including those of ``if``, ``try`` and ``with``."""
    for node in body:
        match node:
            case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                yield node.name, node
            case ast.Import() | ast.ImportFrom():
                for alias in node.names:
                    bound = alias.name.split(".")[0] if isinstance(node, ast.Import) else alias.name
                    yield alias.asname or bound, node
            case ast.Assign():
                for target in node.targets:
                    for name in ast.walk(target):
                        if isinstance(name, ast.Name):
                            yield name.id, node
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield name, node
            case ast.If():
                yield from _bound([*node.body, *node.orelse])
            case ast.Try():
                handlers = [each for handler in node.handlers for each in handler.body]
                yield from _bound([*node.body, *node.orelse, *handlers, *node.finalbody])
            case ast.With():
                yield from _bound(node.body)


def _class_member(cls: Any, name: str) -> ast.AST | None:
    """A class attribute, or one that a method sets on ``self``."""
    found: ast.AST | None = None
    for member, node in _bound(cls.body):
        overload = isinstance(node, Function) and any("overload" in ast.unparse(d) for d in node.decorator_list)
        if member == name and not overload:
            found = node
            if not isinstance(node, Function) or not any("setter" in ast.unparse(d) for d in node.decorator_list):
                return node
    for method in cls.body:
        if found is None and isinstance(method, Function):
            found = _set_on_self(method, name)
    return found


def targets(node: ast.AST) -> list[ast.expr]:
    """What an assignment assigns to."""
    if isinstance(node, ast.Assign):
        return node.targets
    return [node.target] if isinstance(node, ast.AnnAssign | ast.AugAssign) else []


def _set_on_self(method: Function, name: str) -> ast.AST | None:
    arguments = {each.arg: each for each in (*method.args.args, *method.args.kwonlyargs)}
    for node in ast.walk(method):
        for target in targets(node):
            for each in ast.walk(target):
                if isinstance(each, ast.Attribute) and each.attr == name and ast.unparse(each.value) == "self":
                    value = getattr(node, "value", None)
                    if isinstance(node, ast.Assign) and isinstance(value, ast.Name) and value.id in arguments:
                        return arguments[value.id]
                    return node
    return None


def _is_dataclass(cls: Any) -> bool:
    return bool({ast.unparse(each).split("(")[0].split(".")[-1] for each in cls.decorator_list} & PLAIN)


def _is_record(cls: Any) -> bool:
    return bool({ast.unparse(each).split("[")[0].split(".")[-1] for each in cls.bases} & (RECORDS - {"Protocol"}))


def _fields(cls: Any) -> dict[str, inspect.Parameter]:
    text = " ".join(ast.unparse(each) for each in (*cls.decorator_list, *cls.keywords))
    keyword_only = "kw_only=True" in text
    found = {}
    for node in cls.body:
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        value = "" if node.value is None else ast.unparse(node.value)
        if "ClassVar" in ast.unparse(node.annotation) or "init=False" in value:
            continue
        described = value.split("(")[0].split(".")[-1] in ("field", "Field")
        optional = ast.unparse(node.annotation).startswith("NotRequired[")
        required = not optional and (node.value is None or (described and "default" not in value))
        found[node.target.id] = inspect.Parameter(
            node.target.id,
            inspect.Parameter.KEYWORD_ONLY if keyword_only else inspect.Parameter.POSITIONAL_OR_KEYWORD,
            default=inspect.Parameter.empty if required else ...,
        )
    return found

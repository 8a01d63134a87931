"""Every key of the schema changes something: outside the configuration's own checks, some code reads it."""

from __future__ import annotations

import ast
from pathlib import Path

from pydantic import BaseModel

import megatron_fleet
from megatron_fleet.config import schema

PACKAGE = Path(megatron_fleet.__file__).parent


def is_section(annotation: object) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def sections(model: type[BaseModel] = schema.Config, name: str = "config") -> dict[str, type[BaseModel]]:
    """Attribute name of every section → its class."""
    out = {name: model}
    for key, info in model.model_fields.items():
        if is_section(info.annotation):
            out |= sections(info.annotation, key)
    return out


def last_name(node: ast.AST) -> str | None:
    if isinstance(node, ast.Attribute):
        return node.attr.lstrip("_")
    return node.id.lstrip("_") if isinstance(node, ast.Name) else None


class Reads(ast.NodeVisitor):
    """Collects (section class, key) of every ``section.key``, where the section is known by its name, by the annotation
    of a variable (``o: OptimizerConfig``), by an assignment (``o = config.policy.optimizer``), or by what a class
    keeps."""

    def __init__(self, found: set[tuple[type[BaseModel], str]]) -> None:
        self.known = sections()
        self.classes = {model.__name__: model for model in self.known.values()}
        self.found = found

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        outer, self.known = self.known, dict(self.known)
        for init in node.body:
            if isinstance(init, ast.FunctionDef) and init.name == "__init__":
                for argument in init.args.args:
                    self.learn(argument.arg, argument.annotation)
                for statement in init.body:
                    self.visit(statement)
        self.generic_visit(node)
        self.known = outer

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        outer, self.known = self.known, dict(self.known)
        for argument in (*node.args.args, *node.args.kwonlyargs):
            self.learn(argument.arg, argument.annotation)
        self.generic_visit(node)
        self.known = outer

    visit_AsyncFunctionDef = visit_FunctionDef

    def learn(self, name: str, annotation: ast.AST | None) -> None:
        written = ast.unparse(annotation).strip("'\"") if annotation is not None else ""
        if model := self.classes.get(written.rsplit(".", 1)[-1]):
            self.known[name.lstrip("_")] = model

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if name := last_name(node.target):
            self.learn(name, node.annotation)
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        pairs = [(target, node.value) for target in node.targets]
        if isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple):
            pairs = list(zip(node.targets[0].elts, node.value.elts, strict=False))
        for target, value in pairs:
            name, source = last_name(target), last_name(value)
            if name and source in self.known:
                self.known[name] = self.known[source]
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if isinstance(node.ctx, ast.Load) and (model := self.known.get(last_name(node.value) or "")):
            self.found.add((model, node.attr))
        self.generic_visit(node)


def read_by_methods(source: ast.AST) -> dict[tuple[type[BaseModel], str], set[str]]:
    """(section class, method) → keys that the method reads from its section."""
    classes = {model.__name__: model for model in sections().values()}
    return {
        (classes[node.name], method.name): {
            read.attr
            for read in ast.walk(method)
            if isinstance(read, ast.Attribute) and last_name(read.value) == "self"
        }
        for node in ast.walk(source)
        if isinstance(node, ast.ClassDef) and node.name in classes
        for method in node.body
        if isinstance(method, ast.FunctionDef)
    }


def test_every_key_is_read():
    found: set[tuple[type[BaseModel], str]] = set()
    for path in sorted(PACKAGE.rglob("*.py")):
        if PACKAGE / "config" not in path.parents:
            Reads(found).visit(ast.parse(path.read_text(encoding="utf-8")))
    for path in sorted((PACKAGE / "config" / "sections").glob("*.py")):
        methods = read_by_methods(ast.parse(path.read_text(encoding="utf-8")))
        found |= {(method[0], key) for method, keys in methods.items() if method in found for key in keys}
    unread = [
        f"{name}.{key}"
        for name, model in sections().items()
        for key, info in model.model_fields.items()
        if (model, key) not in found and not is_section(info.annotation)
    ]
    assert unread == []


def test_the_reader_sees_each_way_of_reading():
    found: set[tuple[type[BaseModel], str]] = set()
    Reads(found).visit(
        ast.parse("def f(o: OptimizerConfig):\n  o.lr\n  e = c.rollout.engine\n  e.replicas\n  self._run.seed")
    )
    assert {(schema.OptimizerConfig, "lr"), (schema.EngineConfig, "replicas"), (schema.RunConfig, "seed")} <= found
    assert (schema.OptimizerConfig, "eps") not in found
    kept = "class C:\n  def __init__(self, config: EnvConfig):\n    self._c = config\n  def f(self):\n    self._c.url"
    Reads(found).visit(ast.parse(kept))
    assert (schema.EnvConfig, "url") in found
    method = "class EngineConfig(Section):\n  def f(self, n):\n    return self.replicas + n"
    assert read_by_methods(ast.parse(method)) == {(schema.EngineConfig, "f"): {"replicas"}}

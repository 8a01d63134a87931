"""What our code uses of other packages: names, attributes, calls with their arguments, methods that it overrides.

Types are followed from imports and annotations through assignments and loops; `HINTS` has those of expressions that are
annotated ``Any``.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path

from import_graph import MODULES, ROOT
from upstream_sources import CONTAINERS, Function, targets
from upstream_symbols import Missing, Symbols, package_of

PACKAGES = ("vllm", "megatron", "transformer_engine", "fla", "triton")
READ = MODULES | {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in sorted((ROOT / "benchmarks").rglob("*.py"))
}
"""Our modules, and the benchmarks, most of which run on GPUs alone."""
MODULE_NAME = re.compile(rf"(?:{'|'.join(PACKAGES)})(?:\.\w+)+")
IMPORTS = re.compile(rf"^ *(?:from|import) (?:{'|'.join(PACKAGES)})\b", re.MULTILINE)
MEMBER = re.compile(r"^    (\w+): |^    def (\w+)|\bself\.(\w+)", re.MULTILINE)
"""Of a class."""
OURS = "megatron_fleet."
OUTPUT, COMPLETION = "vllm.outputs:RequestOutput()", "vllm.outputs:CompletionOutput()"
OPTIMIZER = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer()"
ADAM = "transformer_engine.pytorch.optimizers.fused_adam:FusedAdam()"
BUFFER = "megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBuffer()"
MOE = "megatron.core.transformer.moe.moe_layer:MoELayer()"
BUCKETS = "megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup()"
CONFIG = "megatron.core.transformer.transformer_config:TransformerConfig()"
SHARD = "megatron.core.dist_checkpointing.mapping:ShardedTensor()"
HINTS: dict[str, dict[str, str]] = {
    "models.qwen3_5.modules.vllm": {
        "batch": "vllm.v1.attention.backends.gdn_attn:GDNAttentionMetadata()",
        "layer": "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn:QwenGatedDeltaNetAttention()",
    },
    "platform.megatron.attention": {"config": CONFIG},
    "rollout.engine_actor": {
        "self._llm": "vllm.v1.engine.async_llm:AsyncLLM()",
        "completion": COMPLETION,
        "output": OUTPUT,
    },
    "rollout.engine_images": {
        "self._renderer": "vllm.renderers.base:BaseRenderer()",
        "found": "vllm.multimodal.inputs:PlaceholderRange()",
    },
    "trainer.megatron.faults": {"module.mlp": MOE},
    "trainer.megatron.gradient_overlap": {
        "bucket": "megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBucket()",
        "group": BUCKETS,
    },
    "trainer.megatron.offload": {
        "part": OPTIMIZER,
        "buffer": BUFFER,
        "b": BUFFER,
        "chunk": "megatron.core.distributed:DistributedDataParallel()",
    },
    "trainer.megatron.optimizer": {
        "chained": "megatron.core.optimizer:ChainedOptimizer()",
        "part": OPTIMIZER,
        "part.optimizer": ADAM,
    },
    "trainer.megatron.parameter_overlap": {"group": BUCKETS},
    "trainer.megatron.routing": {
        "layer.mlp": MOE,
        "layer.mlp.router": "megatron.core.transformer.moe.router:TopKRouter()",
        "moe": MOE,
    },
    "trainer.megatron.saving": {"shard": SHARD},
    "trainer.megatron.state": {"shard": SHARD},
    "weight_sync.broadcast.group": {
        "self._communicator": "vllm.distributed.device_communicators.pynccl:PyNcclCommunicator()",
    },
    "weight_sync.reloading": {
        "engine.model_config": "vllm.config:ModelConfig()",
        "multimodal": "vllm.config:MultiModalConfig()",
    },
}
"""Module → expression → what it is an instance of."""
STRUCTURAL = {
    "weight_sync.cuda_ipc.sender:OutboxClient": "vllm.distributed.weight_transfer.base:VLLMWeightSyncClient",
    "weights.exchange:FormattedSource": "vllm.distributed.weight_transfer.base:WeightSource",
    "trainer.megatron.routing:RouterTap": "megatron.core.transformer.moe.router_replay:RouterReplay",
}
"""Our class → the one whose methods it has, without being derived from it."""
_ATTENTION, _NORM = "megatron.core.transformer.attention:", "megatron.core.transformer.torch_norm:"
BUILT = {
    "platform.megatron.attention:PackedAttention": (f"{_ATTENTION}CoreAttentionBuilder", "CoreAttentionInterface"),
    "platform.megatron.layers:DuplicatedLinear": (f"{_ATTENTION}LinearLayerBuilder", "LinearInterface"),
    "platform.megatron.layers:RMSNorm": (f"{_NORM}LayerNormBuilder", "LayerNormInterface"),
    "platform.megatron.layers:SwiGLU": (
        "megatron.core.transformer.mlp:TEActivationFunctionBuilder", "TEActivationFunctionInterface",
    ),
}  # fmt: skip
"""Our layer → how Megatron calls its constructor and its methods, which 0.16 says only of some."""

PASSED_ON = {
    "trainer.megatron.gradient_overlap:overlap_arguments": "megatron.core.distributed:DistributedDataParallelConfig",
    "trainer.megatron.routing:expert_arguments": CONFIG.removesuffix("()"),
}
"""Our function → what is called elsewhere with the dictionary that it returns."""


@dataclass(frozen=True, slots=True)
class Use:
    """One place where our code relies on a name of another package.

    Attributes:
        target: the name, by the path that our code takes.
        kind: ``name``, ``call`` or ``override``; ``optional``: an attribute that may be missing.
        where: file and line.
        positional, keywords: arguments of a call.
        exact: whether these are all arguments.
        accepts: parameters of a function of ours that takes the target's place.
    """

    target: str
    kind: str
    where: str
    positional: int = 0
    keywords: tuple[str, ...] = ()
    exact: bool = True
    accepts: ast.arguments | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class _OurClass:
    module: str
    node: ast.ClassDef
    instance: bool = False


_Value = str | _OurClass | Function | None
"""What an expression stands for: a name of another package, or something of ours."""


class Reader:
    """Uses in our modules.

    Attributes:
        uses: all of them.
        direct: modules of ours that import such a package themselves.
        missing: file and line, name and reason, for each name that does not exist.
        loose: attribute → file and line, for those that are set on objects of unknown types, or are named in a string.
        unused: keys of `HINTS`, `STRUCTURAL` and `PASSED_ON` that match nothing.
    """

    def __init__(self, symbols: Symbols, modules: Mapping[str, Path] = READ, root: Path = ROOT) -> None:
        self.symbols = symbols
        self.uses: set[Use] = set()
        self.missing: set[tuple[str, str, str]] = set()
        self.loose: dict[str, str] = {}
        self.unused = {f"{module}: {text}" for module, hints in HINTS.items() for text in hints}
        self.unused |= {*STRUCTURAL, *PASSED_ON}
        texts = {name: path.read_text(encoding="utf-8") for name, path in modules.items()}
        self.direct = {name for name, text in texts.items() if IMPORTS.search(text) or name.removeprefix(OURS) in HINTS}
        self.trees = {name: _parsed(text) for name, text in _with_importers(texts, self.direct).items()}
        self.files = {name: path.relative_to(root).as_posix() for name, path in modules.items() if name in self.trees}
        self.patched = self._patched()
        self._names: dict[str, dict[str, _Value]] = {}
        for name in self.trees:
            _Scope(self, name, self.names(name)).functions(self.trees[name].body)
        ours = {name for text in texts.values() for found in MEMBER.findall(text) for name in found}
        self.loose = {name: where for name, where in self.loose.items() if name not in ours}

    def names(self, module: str) -> dict[str, _Value]:
        """Names at the top of one of our modules."""
        if module not in self._names:
            self._names[module] = {}
            _Scope(self, module, self._names[module]).body(self.trees[module].body)
        return self._names[module]

    def kind(self, target: str) -> str | None:
        """What a name is, if it exists."""
        try:
            return self.symbols.lookup(target).kind
        except Missing:
            return None

    @functools.cache  # noqa: B019
    def members(self, cls: ast.ClassDef) -> frozenset[str]:
        """Names that a class of ours binds in its body or on ``self``."""
        functions = {node.name for node in ast.walk(cls) if isinstance(node, Function)}
        assigned = {ast.unparse(target) for node in ast.walk(cls) for target in targets(node)}
        return frozenset(functions | {target.removeprefix("self.") for target in assigned})

    def _patched(self) -> dict[tuple[str, str], list[str]]:
        """Our function ``(module, name)`` → Megatron's modules that are passed to it, by the tables of patches."""
        found: dict[tuple[str, str], list[str]] = {}
        for name, tree in self.trees.items():
            for table in (node for node in ast.walk(tree) if isinstance(node, ast.Dict)):
                for key, value in zip(table.keys, table.values, strict=True):
                    if isinstance(key, ast.Constant) and MODULE_NAME.fullmatch(str(key.value)):
                        *holder, function = ast.unparse(value).split(".")
                        home = f"{name.rpartition('.')[0]}.{holder[0]}" if holder else name
                        found.setdefault((home, function), []).append(str(key.value))
        return found


@functools.cache
def _parsed(text: str) -> ast.Module:
    return ast.parse(text)


def _with_importers(texts: Mapping[str, str], direct: Set[str]) -> dict[str, str]:
    """``direct``, the modules that import something from these, those of `STRUCTURAL`, and tables of patches: no others
    can use a package.
    """
    structural = {OURS + name.partition(":")[0] for name in STRUCTURAL}
    return {
        name: text
        for name, text in texts.items()
        if name in direct | structural
        or any(f"from {each} import" in text for each in direct)
        or MODULE_NAME.search(text)
    }


class _Scope(ast.NodeVisitor):
    """Statements of one module, class or function."""

    def __init__(
        self, reader: Reader, module: str, names: dict[str, _Value], cls: _OurClass | None = None,
        own: dict[str, _Value] | None = None, dicts: Sequence[ast.AST] = (),
    ) -> None:  # fmt: skip
        self._reader, self._module, self._names, self._cls = reader, module, names, cls
        self._own = {} if own is None else own
        """Attributes of ``self``."""
        self._dicts = dicts
        """The function around, to find what is put into its dictionaries."""
        self._short = module.removeprefix(OURS)
        self._hints = HINTS.get(self._short, {})

    def body(self, statements: Sequence[ast.stmt]) -> None:
        for statement in statements:
            self.visit(statement)

    def functions(self, statements: Sequence[ast.stmt]) -> None:
        """Read the functions and classes of a module, whose names are all bound by now."""
        for node in statements:
            if isinstance(node, ast.ClassDef):
                self._class(node)
            elif isinstance(node, Function):
                self._function(node)
            elif isinstance(node, ast.If | ast.Try):
                self.functions(node.body)

    # Bindings

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            if package_of(alias.name) in PACKAGES:
                held = self._use(alias.name, node)
                self._names[alias.asname or package_of(alias.name)] = held if alias.asname else package_of(alias.name)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        module = node.module or ""
        for alias in node.names:
            name = alias.asname or alias.name
            if package_of(module) in PACKAGES:
                self._names[name] = self._use(f"{module}:{alias.name}", node)
            elif module in self._reader.trees:
                self._names[name] = self._reader.names(module).get(alias.name)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._names[node.name] = _OurClass(self._module, node)

    def visit_FunctionDef(self, node: Function) -> None:
        self._names[node.name] = node
        if self._dicts or self._cls:  # a function in a function
            self._function(node)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Assign(self, node: ast.Assign) -> None:
        value = self.infer(node.value)
        for target in node.targets:
            pairs: list[tuple[ast.expr, _Value, ast.expr | None]] = [(target, value, node.value)]
            if isinstance(target, ast.Tuple):
                values = node.value.elts if isinstance(node.value, ast.Tuple) else [None] * len(target.elts)
                pairs = [(t, self.infer(v) if v else None, v) for t, v in zip(target.elts, values, strict=False)]
            for each, found, expression in pairs:
                self._bind(each, found, expression)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        found = self.infer(node.value) if node.value else None
        self._bind(node.target, self._annotated(node.annotation) or found, node.value)

    def _bind(self, target: ast.AST, value: _Value, expression: ast.AST | None) -> None:
        if isinstance(target, ast.Name):
            self._names[target.id] = value
        elif isinstance(target, ast.Attribute):
            holder = self.infer(target.value)
            if isinstance(holder, _OurClass) and holder.instance:
                if self._is_own(holder):
                    self._own[target.attr] = value or self._own.get(target.attr)
            elif isinstance(holder, str):
                self._use(_member(holder, target.attr), target)
                function = self._names.get(expression.id) if isinstance(expression, ast.Name) else None
                if isinstance(function, Function):
                    self._override(_member(holder, target.attr), function, function.args)
            elif holder is None and ast.unparse(target.value) != "ctx":  # torch's, for a backward pass
                self._note_loose(target.attr, target)

    def visit_For(self, node: ast.For | ast.AsyncFor | ast.comprehension) -> None:
        self._bind(node.target, _item(self.infer(node.iter)), None)
        if not isinstance(node, ast.comprehension):
            self.body([*node.body, *node.orelse])

    visit_AsyncFor = visit_For

    def generic_visit(self, node: ast.AST) -> None:
        if isinstance(node, ast.expr):
            self.infer(node)
        else:
            super().generic_visit(node)

    # Functions and classes

    def _function(self, node: Function) -> None:
        for module in self._reader.patched.get((self._module, node.name), [None]) if not self._cls else [None]:
            names = dict(self._names)
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            for each in arguments:
                names[each.arg] = self._annotated(each.annotation)
            if self._cls and arguments and "staticmethod" not in map(ast.unparse, node.decorator_list):
                names[arguments[0].arg] = _OurClass(self._cls.module, self._cls.node, instance=True)
            if module is not None:
                names[arguments[0].arg] = self._use(module, node)
            inner = _Scope(self._reader, self._module, names, self._cls, self._own, [*self._dicts, node])
            inner.body(node.body)
            inner._pass_on(node)

    def _pass_on(self, node: Function) -> None:
        name = f"{self._short}:{node.name}"
        returned = (each.value for each in ast.walk(node) if isinstance(each, ast.Return) and each.value)
        if name in PASSED_ON and (keys := set[str]().union(*map(self._keys, returned))):
            self._reader.unused.discard(name)
            target = PASSED_ON[name]
            self._reader.kind(target)
            self._reader.uses.add(Use(target, "call", self._where(node), 0, tuple(sorted(keys)), exact=False))

    def _class(self, node: ast.ClassDef) -> None:
        cls = _OurClass(self._module, node)
        bases = list(self._upstream_bases(cls))
        structural = STRUCTURAL.get(f"{self._short}:{node.name}")
        if structural is not None:
            self._reader.unused.discard(f"{self._short}:{node.name}")
            bases.extend([structural] if self._use(structural, node) else [])
        bases.extend(self._built(node))
        own: dict[str, _Value] = {}
        scope = _Scope(self._reader, self._module, dict(self._names), cls, own)
        for _ in range(2):  # a method may use what a later one sets
            for method in node.body:
                if isinstance(method, Function):
                    scope._function(method)
                elif not isinstance(method, ast.ClassDef):
                    scope.visit(method)
        for method in (each for each in node.body if isinstance(each, Function)):
            if not method.name.startswith("__"):
                any(self._override(f"{base}().{method.name}", method, _without_self(method)) for base in bases)

    def _built(self, node: ast.ClassDef) -> Iterator[str]:
        """The interface of a layer in `BUILT`."""
        builder, interface = BUILT.get(f"{self._short}:{node.name}", ("", ""))
        if builder:
            self._reader.kind(builder)
            self._reader.uses.add(Use(builder, "optional", self._where(node)))
            (init,) = (each for each in node.body if isinstance(each, Function) and each.name == "__init__")
            self._override(f"{builder}().__call__", init, _without_self(init))
            yield f"{builder.partition(':')[0]}:{interface}"

    def _upstream_bases(self, cls: _OurClass) -> Iterator[str]:
        scope = _Scope(self._reader, cls.module, dict(self._reader.names(cls.module)))
        for base in cls.node.bases:
            found = scope.infer(base.value if isinstance(base, ast.Subscript) else base)
            if isinstance(found, str):
                yield found
            elif isinstance(found, _OurClass):
                yield from self._upstream_bases(found)

    def _is_own(self, cls: _OurClass) -> bool:
        """Whether it is the class around."""
        return self._cls is not None and cls.node is self._cls.node

    def _is_ours(self, cls: _OurClass, name: str) -> bool:
        """Whether one of our classes, or one of its bases that is ours, itself binds ``name``."""
        if name in self._reader.members(cls.node):
            return True
        scope = self._reader.names(cls.module)
        bases = (scope.get(ast.unparse(base)) for base in cls.node.bases)
        return any(isinstance(base, _OurClass) and self._is_ours(base, name) for base in bases)

    # Expressions

    def infer(self, node: ast.AST | None) -> _Value:
        """What an expression stands for; notes all uses in it."""
        if node is None:
            return None
        text = ast.unparse(node) if isinstance(node, ast.Name | ast.Attribute) else ""
        if text in self._hints:
            self._reader.unused.discard(f"{self._short}: {text}")
            return self._hints[text]
        match node:
            case ast.Name():
                return self._names.get(node.id)
            case ast.Attribute():
                return self._attribute(node)
            case ast.Call():
                return self._call(node)
            case ast.Await():
                return self.infer(node.value)
            case ast.Subscript():
                self.infer(node.slice)
                return _item(self.infer(node.value))
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
                for generator in node.generators:
                    self.visit_For(generator)
                    for condition in generator.ifs:
                        self.infer(condition)
                elements = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
                for element in elements:
                    self.infer(element)
                return None
            case ast.Lambda():
                return self.infer(node.body)
        found = [self.infer(child) for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr | ast.keyword)]
        if isinstance(node, ast.BoolOp | ast.IfExp):
            return next((each for each in found if isinstance(each, str)), None)
        if isinstance(node, ast.keyword):
            return self.infer(node.value)
        return None

    def _attribute(self, node: ast.Attribute) -> _Value:
        holder = self.infer(node.value)
        if isinstance(holder, str):
            if node.attr == "__init__" and ast.unparse(node.value) == "super()":
                return holder.removesuffix("()")
            return self._use(_member(holder, node.attr), node)
        if isinstance(holder, _OurClass) and holder.instance:
            if self._is_own(holder) and node.attr in self._own:
                return self._own[node.attr]
            if not self._is_ours(holder, node.attr):
                for base in self._upstream_bases(holder):
                    return self._use(f"{base}().{node.attr}", node)
        return None

    def _call(self, node: ast.Call) -> _Value:
        for argument in (*node.args, *node.keywords):
            self.infer(argument)
        if isinstance(node.func, ast.Name) and node.func.id == "super" and self._cls is not None:
            return next((f"{base}()" for base in self._upstream_bases(self._cls)), None)
        if isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr", "setattr"):
            self._by_name(node)
        function = self.infer(node.func)
        if isinstance(function, Function):
            return self._annotated(function.returns)
        made = None
        if isinstance(function, _OurClass) and not function.instance:
            made = _OurClass(function.module, function.node, instance=True)
            inherits = not self._is_ours(function, "__init__") and not function.node.decorator_list
            function = next(self._upstream_bases(function), None) if inherits else None
        if not isinstance(function, str) or function.endswith(("()", "[]")):
            return made
        keywords: list[str] = []
        exact = not any(isinstance(each, ast.Starred) for each in node.args)
        for each in node.keywords:
            if each.arg is None:
                keywords.extend(self._keys(each.value))
                exact = False
            else:
                keywords.append(each.arg)
        count = sum(not isinstance(each, ast.Starred) for each in node.args)
        self._reader.uses.add(Use(function, "call", self._where(node), count, tuple(sorted(set(keywords))), exact))
        if made is not None:
            return made
        symbol = self._reader.symbols.lookup(function)
        return f"{function}()" if symbol.kind == "class" else _of_interest(symbol.holds)

    def _by_name(self, call: ast.Call) -> None:
        """Note an attribute, named in a string, of an object; it may be missing, except in ``getattr`` and
        ``setattr`` of an object of known type."""
        match call.args:
            case [holder, ast.Constant(value=str(name)), *more]:
                found, function = self.infer(holder), ast.unparse(call.func)
                if found is None:
                    self._note_loose(name, call)
                elif isinstance(found, str) and (function == "hasattr" or (function == "getattr" and more)):
                    self._reader.uses.add(Use(_member(found, name), "optional", self._where(call)))
                    self._reader.kind(_member(found, name))
                elif isinstance(found, str):
                    self._use(_member(found, name), call)

    def _note_loose(self, name: str, node: ast.AST) -> None:
        if self._module in self._reader.direct and not name.startswith("__"):
            self._reader.loose[name] = self._where(node)

    def _use(self, target: str, node: ast.AST) -> str | None:
        """Note a use of a name, or that there is none. Returns what it stands for: itself, or what it holds."""
        if re.split(r"[.:]", target)[-1].startswith("__"):
            return None
        try:
            symbol = self._reader.symbols.lookup(target)
        except Missing as error:
            self._reader.missing.add((self._where(node), target, str(error)))
            return None
        if symbol.kind == "unknown":
            return None
        self._reader.uses.add(Use(target, "name", self._where(node)))
        return target if symbol.kind in ("class", "function") else _of_interest(symbol.holds)

    def _override(self, target: str, node: Function, accepts: ast.arguments) -> bool:
        """Note that a function of ours takes the place of another package's, if there is one of that name."""
        if self._reader.kind(target) != "function":
            return False
        self._reader.uses.add(Use(target, "override", self._where(node), accepts=accepts))
        return True

    def _annotated(self, annotation: ast.AST | None) -> _Value:
        """Instance of an annotation's class; items of a container have ``[]`` at the end of their path."""
        match annotation:
            case ast.Constant(value=str(text)):
                return self._annotated(ast.parse(text, mode="eval").body)
            case ast.BinOp(op=ast.BitOr()):
                return self._annotated(annotation.left) or self._annotated(annotation.right)
            case ast.Subscript():
                outer = ast.unparse(annotation.value)
                inner = annotation.slice.elts[0] if isinstance(annotation.slice, ast.Tuple) else annotation.slice
                if outer == "type":
                    found = self.infer(inner)
                    return found if isinstance(found, str) else None
                found = self._annotated(inner) if outer in CONTAINERS else self._annotated(annotation.value)
                return f"{found}[]" if outer in CONTAINERS and isinstance(found, str) else found
            case ast.Name() | ast.Attribute():
                found = self.infer(annotation)
                if isinstance(found, _OurClass):
                    return _OurClass(found.module, found.node, instance=True)
                if isinstance(found, str) and not found.endswith(("()", "[]")):
                    return f"{found}()" if self._reader.symbols.lookup(found).kind == "class" else None
        return None

    def _keys(self, node: ast.AST) -> set[str]:
        """Keys that are known of a dictionary passed with ``**``."""
        match node:
            case ast.Dict():
                constant = {str(k.value) for k in node.keys if isinstance(k, ast.Constant)}
                inner = [v for k, v in zip(node.keys, node.values, strict=True) if k is None]
                return constant.union(*map(self._keys, inner))
            case ast.BinOp(op=ast.BitOr()):
                return self._keys(node.left) | self._keys(node.right)
            case ast.IfExp():
                return self._keys(node.body) | self._keys(node.orelse)
            case ast.Name():
                return self._put_into(node.id)
            case ast.Call(func=ast.Name(id="dict")):
                return {k.arg for k in node.keywords if k.arg}.union(*map(self._keys, node.args))
            case ast.Call():
                function = self.infer(node.func)
                if isinstance(function, Function):
                    within = _Scope(self._reader, self._module, dict(self._names), dicts=[function])
                    found = (each.value for each in ast.walk(function) if isinstance(each, ast.Return) and each.value)
                    return set[str]().union(*map(within._keys, found))
        return set()

    def _put_into(self, name: str) -> set[str]:
        keys: set[str] = set()
        statements = self._dicts or self._reader.trees[self._module].body
        for node in (node for statement in statements for node in ast.walk(statement)):
            for target in targets(node):
                if isinstance(target, ast.Name) and target.id == name:
                    value = getattr(node, "value", None)
                    keys |= self._keys(value) if value is not None else set()
                if isinstance(target, ast.Subscript) and ast.unparse(target.value) == name:
                    keys |= {str(target.slice.value)} if isinstance(target.slice, ast.Constant) else set()
        return keys

    def _where(self, node: ast.AST) -> str:
        return f"{self._reader.files[self._module]}:{getattr(node, 'lineno', 0)}"


def _member(holder: str, name: str) -> str:
    return f"{holder}{'.' if ':' in holder else ':'}{name}"


def _of_interest(target: str | None) -> str | None:
    """``None`` for what belongs to a package that the type checker knows anyway."""
    return target if target is not None and package_of(target) in PACKAGES else None


def _item(value: _Value) -> str | None:
    return value.removesuffix("[]") if isinstance(value, str) and value.endswith("[]") else None


def _without_self(method: Function) -> ast.arguments:
    a = method.args
    rest = a.args[1:] if not a.posonlyargs else a.args
    return ast.arguments(a.posonlyargs[1:], rest, a.vararg, a.kwonlyargs, a.kw_defaults, a.kwarg, a.defaults)

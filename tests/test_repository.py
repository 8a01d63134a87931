"""House rules that hold for every file: who may import whom, sizes, nothing that belongs to one machine."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from import_graph import MODULES, PACKAGE, ROOT, imports
from waiting import HANG_S

MAX_FILE_LINES = 700
MAX_FUNCTION_LINES = 80

# Package → what it may import besides itself, config and platform: a package, or one module of it. "" is the root.
MAY_IMPORT: dict[str, set[str]] = {
    "": {
        "analysis", "convert", "data", "debug", "doctor", "evaluation", "launch", "loop", "planning", "preflight",
        "trainer.rank", "tuning", "weights", "cluster.inventory", "cluster.node_process",
    },
    "agents": {"envs", "data", "models"},
    "algorithms": {"agents.trajectory"},
    "analysis": {"agents.trajectory", "checkpoint", "data", "models.images", "storage", "telemetry"},
    "checkpoint": {
        "cluster.inventory", "cluster.launcher", "convert.check", "convert.plan", "data.split", "storage",
        "telemetry.sinks", "telemetry.slack", "trainer.base", "weights.hf_folder",
    },
    "cluster": {"weights.fetch.cache"},
    "convert": {
        "cluster.inventory", "models", "rollout.engine_arguments", "rollout.engine_images", "storage",
        "weight_sync.vllm_plugin", "weights",
    },
    "config": set(),
    "data": {"storage"},
    "debug": {"algorithms", "checkpoint", "storage", "trainer"},
    "doctor": {
        "cluster", "data.dataset", "envs", "hosted.address", "hosted.prices", "hosted.service", "planning", "storage",
        "telemetry", "weights",
    },
    "embedded_fleet": {
        "data.task", "envs.base", "envs.embedded_server", "envs.openenv_client", "envs.openenv_tools", "storage",
    },
    "envs": {"data.task"},
    "evaluation": {
        "agents", "algorithms", "cluster.launcher", "convert", "data", "models", "preflight", "rollout", "storage",
        "telemetry",
    },
    "hosted": {
        "agents.token_engine", "algorithms", "cluster.restarts", "models.images", "rollout.engine_statistics",
        "rollout.sampler", "storage", "trainer.base", "trainer.registry", "weight_sync.base", "weights.hf_folder",
    },
    "launch": {"planning", "storage"},
    "loop": {
        "agents", "algorithms", "checkpoint", "cluster", "data", "debug", "evaluation", "models", "planning",
        "rollout", "storage", "telemetry", "trainer", "weight_sync",
    },
    "models": {"envs.base"},
    "planning": {
        "algorithms.loss_metrics", "cluster.inventory", "cluster.placement", "hosted.passes", "hosted.prices", "models",
        "rollout.concurrency", "telemetry.charts", "weights.mapping",
    },
    "platform": set(),
    "preflight": {
        "agents", "cluster", "data", "embedded_fleet", "envs", "hosted.address", "hosted.prices", "hosted.service",
        "models", "planning", "storage", "telemetry", "trainer.precision", "weight_sync", "weights.model_check",
    },
    "rollout": {"agents", "algorithms", "cluster", "data", "envs", "models", "weight_sync"},
    "storage": set(),
    "telemetry": {"agents.trajectory", "algorithms", "models.images", "storage", "trainer.base"},
    "trainer": {"algorithms", "cluster", "models", "storage", "weight_sync", "weights"},
    "tuning": {
        "agents.token_engine", "algorithms", "models", "planning.memory", "rollout", "storage", "trainer", "weights",
    },
    "weight_sync": {"models", "storage", "weights"},
    "weights": {"models", "storage"},
}  # fmt: skip
NOT_IN_EPISODE_ENVIRONMENT = {"torch", "vllm", "transformers", "megatron", "hydra"}
EPISODE_SIDE = ("data", "envs", "agents", "models", "rollout.worker")
WITH_TORCH = re.compile(r"megatron_fleet\.models\.\w+\.modules(\.|$)")
"""Modules of a model family for Megatron and vLLM, imported where a model is built."""
LIGHT = (
    *("cli", "cluster", "config", "data", "doctor", "launch", "preflight", "models.layout", "planning"),
    *("trainer.base", "trainer.precision"),
)
"""Modules whose import must stay quick."""


def package_of(module: str) -> str:
    """Package of a module; "" for the files of the root."""
    in_root = MODULES[module].parent == PACKAGE
    return "" if in_root else module.split(".")[1]


@pytest.mark.parametrize("package", ["", *sorted(p.name for p in PACKAGE.iterdir() if (p / "__init__.py").exists())])
def test_a_package_imports_only_what_it_may(package):
    assert package in MAY_IMPORT, "a new package: say in MAY_IMPORT what it may import"
    assert any(package_of(module) == package for module in MODULES)
    allowed = {package, "config", "platform"} | MAY_IMPORT[package]
    wrong = [
        f"{module} imports {target}"
        for module in MODULES
        if package_of(module) == package
        for target in imports(module)
        if target.startswith("megatron_fleet.")
        and not any(f"{target}.".startswith(f"megatron_fleet.{name}.") for name in allowed)
    ]
    assert wrong == []


def test_no_package_imports_one_that_imports_it():
    """Also for types alone, and inside functions."""
    graph: dict[str, set[str]] = {}
    for module in MODULES:
        found = {package_of(target) for target in imports(module) if target in MODULES}
        graph.setdefault(package_of(module), set()).update(found - {"", package_of(module)})
    TopologicalSorter(graph).prepare()


def test_no_file_imports_one_that_imports_it():
    """The same; a section of the configuration may name the whole, of which its rules speak."""
    graph = {module: {target for target in imports(module) if target in MODULES} - {module} for module in MODULES}
    for module in (module for module in MODULES if package_of(module) == "config"):
        graph[module] = {target for target in graph[module] if package_of(target) != "config"}
    TopologicalSorter(graph).prepare()


def closure(*starts: str) -> dict[str, str]:
    """Every module that importing ``starts`` (packages or modules) imports → one module that asks for it."""
    pending = [
        m for m in MODULES for s in starts if f"{m}.".startswith(f"megatron_fleet.{s}.") and not WITH_TORCH.match(m)
    ]
    assert pending
    reached = dict.fromkeys(pending, "")
    while pending:
        module = pending.pop()
        for target in imports(module, whole=False):
            if target not in reached:
                reached[target] = module
                if target in MODULES:
                    pending.append(target)
    return reached


def test_the_episode_side_needs_nothing_of_the_engine_environment():
    reached = closure(*EPISODE_SIDE)
    wrong = [f"{who} imports {m}" for m, who in reached.items() if m.split(".")[0] in NOT_IN_EPISODE_ENVIRONMENT]
    assert wrong == []


def test_the_controller_needs_no_torch():
    """Modules that importing it imports, directly or through our own; not those that its functions import."""
    reached = closure("cli", "loop", "cluster", "doctor", "launch", "models", "planning", "trainer.group")
    wrong = [f"{who} imports {m}" for m, who in reached.items() if m.split(".")[0] in ("torch", "vllm", "megatron")]
    assert wrong == []


def test_light_modules_import_nothing_heavy():
    names = [m for m in MODULES for s in LIGHT if f"{m}.".startswith(f"megatron_fleet.{s}.")]
    program = f"import sys, {', '.join(names)}\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=HANG_S, check=True)
    loaded = {name.split(".")[0] for name in done.stdout.split()}
    assert loaded & {"torch", "vllm", "ray", "transformers", "megatron", "hydra"} == set()


def test_the_kind_of_environments_is_compared_in_one_place():
    """Others ask `EnvConfig.about`: a new kind is described there and opened in `envs.registry`."""
    compared = re.compile(r"env\.kind (==|!=|in|not in) |match \S*env\.kind")
    found = {module for module, path in MODULES.items() if compared.search(path.read_text(encoding="utf-8"))}
    assert found == {"megatron_fleet.config.sections.env"}


TAKE_THE_WHOLE_CONFIG = 56
"""Files that may: those that put a run, a plan or a command together, that check rules across sections, that read four
sections or more, that open parts of the user's own, and that keep the whole. A number that falls is lowered here."""


def test_the_whole_configuration_stops_at_the_top():
    """Others take the sections that they read, so that their signatures say what they depend on. The rules of the
    sections themselves, which are in `config`, are not counted.
    """
    found = {
        module
        for module, path in MODULES.items()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        for annotation in _annotations(node)
        if package_of(module) != "config"
        and any(isinstance(part, ast.Name) and part.id == "Config" for part in ast.walk(annotation))
    }
    assert len(found) <= TAKE_THE_WHOLE_CONFIG, sorted(found)


def _annotations(node: ast.AST) -> list[ast.expr]:
    """Types of the parameters of a function, and of the fields of a class, which are parameters of dataclasses."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        given = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
        return [one.annotation for one in given if one.annotation is not None]
    return (
        [one.annotation for one in node.body if isinstance(one, ast.AnnAssign)]
        if isinstance(node, ast.ClassDef)
        else []
    )


def python_files() -> list[Path]:
    return [
        f
        for top in ("megatron_fleet", "tests", "requirements", "benchmarks", "tools")
        for f in (ROOT / top).rglob("*.py")
    ]


def test_files_are_short():
    lengths = {f: len(f.read_text(encoding="utf-8").splitlines()) for f in python_files()}
    assert {str(f.relative_to(ROOT)): n for f, n in lengths.items() if n > MAX_FILE_LINES} == {}


def test_the_training_loop_is_short():
    """It is what a reader begins with."""
    assert len((PACKAGE / "loop" / "train.py").read_text(encoding="utf-8").splitlines()) < 200


def test_functions_are_short():
    long = [
        f"{module}.{node.name}: {length} lines"
        for module, path in MODULES.items()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (length := (node.end_lineno or 0) - node.lineno + 1) > MAX_FUNCTION_LINES
    ]
    assert long == []


ESCAPED = {
    *("cli", "config.errors", "storage.progress"),  # with `printable`
    "analysis.trajectories_commands",  # with `episodes.shown`
    *("config.keys", "telemetry.registry"),  # documents, from the code
    *("embedded_fleet.sandbox", "embedded_fleet.server", "envs.fleet_package", "models.chat.template_process"),
    *("cluster.node_process", "loop.main", "telemetry.trackers"),  # numbers and names of ours
}


def test_what_is_printed_is_escaped():
    """Commands print with `say`, or JSON, which escapes by itself."""
    found = {
        f"{module}:{node.lineno}"
        for module, path in MODULES.items()
        if module.removeprefix("megatron_fleet.") not in ESCAPED
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "print" and node.args
        if not isinstance(node.args[0], ast.Constant) and not ast.unparse(node.args[0]).startswith("json.dumps(")
    }
    assert found == set()


RENAMES = {
    *("storage.local", "storage.staging"),
    "checkpoint.resume_point",  # moves the records of an earlier run aside
}


def test_files_and_folders_are_made_whole_in_storage():
    """Others use `write_atomically`, `begin_folder` with `commit_folder`, and `open_staging`."""
    found = {
        module.removeprefix("megatron_fleet.")
        for module, path in MODULES.items()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and (node.func.attr == "rename" or ast.unparse(node.func) == "os.replace")
    }
    assert found == RENAMES


EXCHANGES = {
    "platform.communicator",
    "platform.megatron.patches",  # versions of Megatron's own exchanges
    "weight_sync.broadcast.group",  # between trainer and engines
}


def test_ranks_exchange_through_the_communicator():
    """Others may name a group (``ProcessGroup``) and use PyTorch's checkpoints, which are files."""
    found = {
        module.removeprefix("megatron_fleet.")
        for module, path in MODULES.items()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if _imports_torch_distributed(node)
    }
    assert found == EXCHANGES


def _imports_torch_distributed(node: ast.AST) -> bool:
    if isinstance(node, ast.Import):
        return any(alias.name == "torch.distributed" for alias in node.names)
    if not isinstance(node, ast.ImportFrom) or node.level:
        return False
    names = {alias.name for alias in node.names}
    return (node.module == "torch.distributed" and not names <= {"ProcessGroup", "checkpoint"}) or (
        node.module == "torch" and "distributed" in names
    )


def test_test_files_have_different_names():
    names = [f.name for f in (ROOT / "tests").rglob("test_*.py")]
    assert sorted({n for n in names if names.count(n) > 1}) == []


def text_files() -> Iterator[Path]:
    generated = {".git", ".venv", "runs", "megatron_fleet.egg-info", "__pycache__"}
    for folder, folders, names in os.walk(ROOT):
        folders[:] = [f for f in folders if f not in generated and not f.endswith("_cache") and f != ".hypothesis"]
        for name in names:
            path = Path(folder, name)
            if path != Path(__file__) and path.suffix not in {".safetensors", ".png", ".pyc"}:
                yield path


def test_nothing_belongs_to_one_machine():
    places = re.compile(
        r"(?<![\w.])/(work|root|opt|home/\w+)/\w|pypi\.org|pythonhosted|index-url (?!https://download\.pytorch)"
    )
    wrong = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:80]}"
        for path in text_files()
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="ignore").splitlines(), 1)
        if places.search(line)
    ]
    assert wrong == []


def test_every_test_runs_in_some_environment():
    """Tests that need the episode environment are among the paths that ./test runs there."""
    (listed,) = re.findall(r"EPISODE_TESTS=\((.*)\)", (ROOT / "test").read_text(encoding="utf-8"))
    needing = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "tests").rglob("test_*.py")
        if 'importorskip("openenv' in path.read_text(encoding="utf-8") and path != Path(__file__)
    }
    assert needing
    assert {path for path in needing if not path.startswith(tuple(listed.split()))} == set()


STARTERS = {
    *("run", "call", "check_call", "check_output", "getoutput", "getstatusoutput", "Popen"),
    *("create_subprocess_exec", "create_subprocess_shell", "system", "popen"),
}


def test_every_child_process_is_given_its_environment():
    """Else it inherits every secret; see `config.secrets.without_secrets`."""
    calls = [
        (f"{module}:{node.lineno}", node)
        for module, path in MODULES.items()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in STARTERS
        if ast.unparse(node.func.value) in ("subprocess", "os", "asyncio") and ast.unparse(node.func) != "asyncio.run"
    ]
    assert len(calls) > 8
    assert {place for place, call in calls if "env" not in {given.arg for given in call.keywords}} == set()


CLOCKS = {"time.monotonic()", "time.perf_counter()", "time.time()", "monotonic()", "perf_counter()"}
WAITS = {
    **dict.fromkeys(("run", "check_output"), "subprocess"),
    **dict.fromkeys(("timeout", "wait_for"), "asyncio"),
    "communicate": "",
}


@pytest.mark.slow
def test_no_test_depends_on_the_speed_of_the_machine():
    """No asserted upper bound on a measured time, and no deadline below `HANG_S` on what must happen.

    Exempt are tests in simulated time, and blocks that expect the deadline to pass.
    """
    found = set()
    for path in sorted((ROOT / "tests").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        exempt = {
            id(inner)
            for node in ast.walk(tree)
            if _in_simulated_time(node) or _expects_a_deadline(node)
            for inner in ast.walk(node)
        }
        for node in ast.walk(tree):
            if id(node) not in exempt and (_bounds_a_time(node) or _short_deadline(node)):
                found.add(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert found == set()


def _in_simulated_time(node: ast.AST) -> bool:
    decorators = getattr(node, "decorator_list", ())
    return any(ast.unparse(decorator).endswith("in_simulated_time") for decorator in decorators)


def _expects_a_deadline(node: ast.AST) -> bool:
    """``with pytest.raises(TimeoutError)`` and the like."""
    items = node.items if isinstance(node, ast.With | ast.AsyncWith) else ()
    return any(re.search(r"(raises|suppress)\(.*Timeout", ast.unparse(item.context_expr)) for item in items)


def _bounds_a_time(node: ast.AST) -> bool:
    """``assert clock() - begin < 5``."""
    if not isinstance(node, ast.Compare) or not isinstance(node.ops[0], ast.Lt | ast.LtE):
        return False
    left = node.left
    return isinstance(left, ast.BinOp) and isinstance(left.op, ast.Sub) and ast.unparse(left.left) in CLOCKS


def _short_deadline(node: ast.AST) -> bool:
    """``subprocess.run(…, timeout=60)``, ``asyncio.timeout(5)``, ``asyncio.wait_for(…, 5)``."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or node.func.attr not in WAITS:
        return False
    if WAITS[node.func.attr] not in ("", ast.unparse(node.func.value)):
        return False
    given = [keyword.value for keyword in node.keywords if keyword.arg == "timeout"]
    given += node.args[-1:] if WAITS[node.func.attr] == "asyncio" else []
    seconds = [value.value for value in given if isinstance(value, ast.Constant)]
    return any(isinstance(value, int | float) and 0 < value < HANG_S for value in seconds)


def test_the_longest_test_files_exist(pytestconfig):
    """Else a renamed one is left for the end of a run."""
    (listed,) = {plugin.LONGEST for plugin in pytestconfig.pluginmanager.get_plugins() if hasattr(plugin, "LONGEST")}
    assert listed and {file for file in listed if not (ROOT / "tests" / file).is_file()} == set()

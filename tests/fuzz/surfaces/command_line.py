"""The arguments of ``mfleet``. What would start processes is left out: it has its arguments then."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

from fuzz import folders, models
from fuzz.engine import Surface
from fuzz.outcomes import command
from fuzz.surfaces import run_folder
from fuzz.trees import Special, value_of

from megatron_fleet import cli
from megatron_fleet.config.load import dump_resolved, load
from megatron_fleet.evaluation import eval_command as evaluation
from megatron_fleet.loop import main as training
from megatron_fleet.tuning import tune_commands as tune

QUICK = "experiment=quickstart"


def seeds() -> list[Any]:
    lines = [
        ["config", QUICK, "run.steps=3"],
        ["config", "model=tiny", "--out", "out", "data.tasks=embedded"],
        ["train", "--dry-run", QUICK, "parallel.tensor=1", "policy.optimizer.lr=1e-2"],
        ["train", "--dry-run", "--resolved", "in/config.json"],
        ["eval", QUICK, "--out", "out", "--tasks", "all"],
        ["eval", QUICK, "--endpoint", "https://host/v1", "--model", "m", "--out", "out"],
        ["eval", QUICK, "--endpoint", "https://host/v1", "--model", "m", 'eval.endpoint.extra_body={"top_p": 0.9}'],
        ["data", "inspect", "in/tasks.json", "--json"],
        ["data", "inspect", "embedded", "data.eval_fraction=0.3"],
        ["data", "prepare", "in/tasks.json", "--out", "out", "data.max_tasks=3"],
        ["data", "export", "out.json"],
        ["convert", "inspect", "in/hf", "--every"],
        ["convert", "inspect", "in/hf", "--hashes", "out.json", "--workers", "1"],
        ["convert", "to-megatron", "in/hf", "out", "--workers", "1", "--shard", "1/2", "--layer-keys", "numbered"],
        ["convert", "to-megatron", "in/hf", "out", "--plan"],
        ["convert", "verify", "in/hf", "in/hf", "--tolerance", "0.5", "--workers", "1"],
        ["model", "extend", "in/hf", "out", "--factor", "4", "--original", "256"],
        ["report", "in/run", "--out", "out.html", "--markdown", "out.md"],
        ["--version"],
    ]
    return [{"arguments": line} for line in lines]


@cache
def _files() -> TemporaryDirectory[str]:
    """Files and keys that the arguments name."""
    place = TemporaryDirectory(prefix="fuzz-files-")
    root = Path(place.name)
    models.written(root / "hf", models.folder("qwen3"))
    folders.write(root / "run", run_folder.seeds()[0])
    rows = [{"task_key": f"t{i}", "prompt": f"find {i}", "env_key": "shop"} for i in range(8)]
    (root / "tasks.json").write_text(json.dumps(rows))
    (root / "config.json").write_text(dump_resolved(load([QUICK])))
    return place


def check(tree: Any, folder: Path) -> bool:
    given = value_of(tree.get("arguments") if isinstance(tree, dict) else tree)
    # A program's arguments hold no NUL, and what is not UTF-8 comes as halves of surrogate pairs.
    arguments = [_argument(text) for text in given if isinstance(text, str)] if isinstance(given, list) else []
    place = folder / "a" / "b"
    shutil.copytree(_files().name, place / "in")
    folders.write(place / "in", {"fifo": Special("fifo"), "fifo.json": Special("fifo"), "full": Special("device")})
    before = folders.read(place / "in")
    with _inert(place):
        done = command(*arguments, allowed=(0, 1, 2) if "verify" in arguments else (0, 2))
    if done.status == 2:
        assert not folders.left_over(folder), folders.left_over(folder)
    after = folders.read(place / "in")
    assert all(after.get(name) == data for name, data in before.items() if not name.startswith("run/report"))
    return done.status == 0


def _argument(text: str) -> str:
    text = text.replace("\0", "")
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        return text.encode("utf-8", "replace").decode()
    return text


@contextmanager
def _inert(place: Path) -> Iterator[None]:
    """In a folder of its own, with nothing that starts processes."""
    before = Path.cwd()
    with ExitStack() as stack:
        for module, name in ((training, "main"), (evaluation, "main")):
            stack.enter_context(patch.object(module, name, lambda *_: 0))
        for name in ("_rank", "_node", "_make_random", "_replay"):
            stack.enter_context(patch.object(cli, name, lambda _: 0))
        for name in ("_precision", "_trainer", "_engine"):
            stack.enter_context(patch.object(tune, name, lambda _: 0))
        stack.enter_context(patch.dict(os.environ, {"HOME": str(place)}))
        stack.enter_context(patch.object(cli.signal, "signal", lambda *_: None))
        os.chdir(place)
        try:
            yield
        finally:
            os.chdir(before)


PLACES = (
    "in/fifo",
    "in/fifo.json",
    "in/full",
    "in/full/x",
    "in",
    "in/hf",
    "in/run",
    "in/tasks.json",
    "out",
    "/dev/null",
)
WORDS = (
    *("--out", "--shard", "9/3", "1/" + "9" * 5000, "run.out=", "model.path=", "--factor=1e300", "data.tasks=", "++"),
    *("eval.endpoint.extra_body=" + "[" * 1500, "eval.endpoint.url=http://u:p@h"),
)
SURFACE = Surface("command_line", 60, seeds, check, (*PLACES, *WORDS))

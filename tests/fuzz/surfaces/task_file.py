"""A task file, and a folder of prepared tasks, as ``mfleet data inspect`` reads them."""

from __future__ import annotations

import hashlib
import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fuzz import folders
from fuzz.engine import Surface
from fuzz.outcomes import refusal_of

from megatron_fleet.config.sections.data import DataConfig
from megatron_fleet.data import source
from megatron_fleet.data.dataset import build
from megatron_fleet.data.inspection import as_json, describe, inspect
from megatron_fleet.data.rows import ALIASES
from megatron_fleet.data.source import read_bytes

LIST = {"reason": "broken", "environments": ["shop"], "tasks": ["t3"]}


@cache
def seeds() -> list[Any]:
    rows = [
        {"task_key": f"t{i}", "prompt": f"find number {i} in the list", "env_key": env, "env_variables": {"A": 1}}
        for i, env in enumerate(("shop", "shop", "forge", "shop"))
    ]
    full = {names[-1]: "text" for names in ALIASES.values()} | {"task_modality": "tool_use", "difficulty": 2}
    full["env_variables"] = {"CURRENT_DATE": "2025-01-01"}
    shipped = json.loads(read_bytes("embedded"))
    shipped = shipped["tasks"] if isinstance(shipped, dict) else shipped
    with TemporaryDirectory() as place:
        Path(place, "tasks.json").write_text(json.dumps(rows))
        dataset = build(DataConfig(tasks=f"{place}/tasks.json"))
        source.write_prepared(f"{place}/made", dataset.split.train, dataset.split.held_out, dataset.manifest)
        made = {f"made/{name}": data for name, data in folders.read(Path(place, "made")).items()}
    split = json.loads(made["made/split.json"]) | {"files": {}}
    return [
        {"tasks.json": rows},
        {"tasks.json": {"tasks": [*rows, full]}, "list.json": LIST},
        {"tasks.json": shipped[:6]},
        {"tasks.json": json.dumps(rows).encode()},
        {"tasks.json": rows, "split.json": split},
        made | {"made/split.json": split},
        made,
    ]


def check(tree: Any, folder: Path) -> bool:
    files = dict(tree) if isinstance(tree, dict) else {}
    split = files.get("made/split.json")
    if isinstance(split, dict) and split.get("files") == {}:
        tables = (name for name in files if name.endswith(".parquet") and isinstance(files[name], bytes))
        hashes = {name.removeprefix("made/"): hashlib.sha256(files[name]).hexdigest() for name in tables}
        files["made/split.json"] = split | {"files": hashes}
    folders.write(folder, files)
    made = any(name.startswith("made/") for name in files)
    data = DataConfig(
        tasks=str(folder / ("made" if made else "tasks.json")),
        exclusions=(str(folder / "list.json"),) if "list.json" in files else (),
        split_manifest=str(folder / "split.json") if "split.json" in files else None,
    )
    with refusal_of(folder, "data."):
        found = inspect(data)
        json.dumps(as_json(found), ensure_ascii=False).encode()
        describe(found)
        return not found.problems
    return False


SURFACE = Surface("task_file", 600, seeds, check, words=("task_key", "env_key", "prompt", "tasks", "all", "env_id"))

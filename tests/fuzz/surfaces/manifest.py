"""A run's checkpoint and a dumped step: manifest, state of the controller, record and data of an update."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from fuzz import folders
from fuzz.engine import Surface
from fuzz.outcomes import refusal_of

from megatron_fleet.algorithms.datum import Datum
from megatron_fleet.checkpoint.checkpoints import Checkpoint
from megatron_fleet.debug.dumps import open_dump

RECORD = {
    "step": 3,
    "part": 0,
    "verdict": "spike",
    "device": "cpu",
    "lr": 1e-5,
    "loss": 0.5,
    "grad_norm": "inf",
    "median": 1.0,
    "micro_batches": [{"sequences": [0], "loss": 0.5}],
    "weights": [],
    "gradients": ["a"],
    "parameters": 7,
}
_FLOATS = ("loss_mask", "scaled_advantages", "behaviour_logprobs")
DATA = {
    "sequences": 2,
    "loss_scale": [1.0, 1.0],
    "plain": ["{}", "{}"],
    "token_ids": [1, 2, 3, 4, 5],
    "token_ids.lengths": [2, 3],
    **{name: [0.0, 1.0, 0.0, 1.0, 1.0] for name in _FLOATS},
    **{f"{name}.lengths": [2, 3] for name in _FLOATS},
}


def seeds() -> list[Any]:
    dump = {"record.json": RECORD, "data.npz": DATA, "config.json": {}, "state/.metadata": b"x"}
    manifest = {"format": 1, "step": 10, "files": {}}
    return [
        {"trainer_state.json": {"sampler": [1, 2]}, "__0_0.distcp": b"abc", "manifest.json": manifest},
        dump | {"manifest.json": manifest},
    ]


def check(tree: Any, folder: Path) -> bool:
    files = dict(tree) if isinstance(tree, dict) else {}
    place = folder / "step_000010"
    manifest = files.get("manifest.json")
    if isinstance(manifest, dict) and manifest.get("files") == {}:
        own = {n: folders.content_of(n, c) for n, c in files.items() if n != "manifest.json"}
        listed = {n: {"bytes": len(c), "sha256": hashlib.sha256(c).hexdigest()} for n, c in own.items()}
        files["manifest.json"] = manifest | {"files": listed}
    folders.write(place, files)
    with refusal_of(place):
        opened = Checkpoint.open(place)
        opened.verify()
        if "record.json" in files:
            assert all(isinstance(datum, Datum) for datum in open_dump(place).data())
        else:
            opened.trainer_state()
        return True
    return False


SURFACE = Surface("manifest", 350, seeds, check, words=("bytes", "sha256", "manifest.json", "nan", "lengths"))

"""Locate the checkpoint in a folder: a Megatron-LM run folder, one of this project's runs, or the checkpoint itself."""

from __future__ import annotations

import re
from collections.abc import Mapping

from megatron_fleet.config.errors import UserError
from megatron_fleet.weights.torch_dist.index import METADATA, METADATA_JSON, Read

TRACKER = "latest_checkpointed_iteration.txt"
_MANIFEST = "manifest.json"
_CANDIDATE = re.compile(r"(?:checkpoints/)?(?:iter_\d{7,}|release|step_\d{6,})")
_NAMED = 8


def locate(read: Read, sizes: Mapping[str, int], where: str) -> str:
    """Path of the checkpoint relative to a folder: ``""``, ``iter_0000123``, ``checkpoints/step_000040``…

    A folder with ``.metadata`` or ``metadata.json`` is the checkpoint itself. In a Megatron-LM run folder the tracker
    file names the checkpoint; in a run folder of this project it is the last committed step. Without either, it must be
    the only candidate.

    Args:
        sizes: name → bytes of all files below the folder.
        where: the folder, for messages.

    Raises:
        UserError: there is no candidate, or several; names them.
    """
    if METADATA in sizes or METADATA_JSON in sizes:
        return ""
    candidates = sorted(
        folder
        for name in sizes
        for folder, _, file in [name.rpartition("/")]
        if file == METADATA and _CANDIDATE.fullmatch(folder)
    )
    listed = ", ".join(candidates[-_NAMED:]) or "no checkpoint"
    if TRACKER in sizes:
        return _tracked(read(TRACKER, 0, min(64, sizes[TRACKER])), candidates, listed, where)
    steps = [folder for folder in candidates if "step_" in folder and f"{folder}/{_MANIFEST}" in sizes]
    if steps and len(steps) == len(candidates):
        return max(steps, key=lambda folder: int(folder.rpartition("_")[2]))
    if len(candidates) == 1:
        return candidates[0]
    if candidates:
        raise UserError(f"{where} holds {listed} and no {TRACKER}; give one of these folders.")
    raise UserError(
        f"{where}: neither {METADATA} nor {TRACKER} nor a step_… folder is there; give the folder of a torch_dist "
        f"checkpoint."
    )


def _tracked(content: bytes, candidates: list[str], listed: str, where: str) -> str:
    """The folder named by Megatron-LM's tracker file: ``release`` or an iteration number."""
    text = content.decode("ascii", "replace").strip()
    if text != "release" and not re.fullmatch(r"\d{1,18}", text):
        raise UserError(f"{where}/{TRACKER}: expected a number or 'release', found {text!r}; write which to use.")
    folder = text if text == "release" else f"iter_{int(text):07d}"
    if folder not in candidates:
        raise UserError(
            f"{where}/{TRACKER} names {folder}, which holds no {METADATA}, and the folder has {listed}; "
            f"write one that is there."
        )
    return folder

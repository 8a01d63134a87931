"""Origin of a checkpoint, found from its location: the template stored with it, the run it belongs to."""

from __future__ import annotations

import json
import os
from pathlib import Path

from megatron_fleet.config.errors import UserError
from megatron_fleet.convert.from_arguments import template_from_arguments
from megatron_fleet.convert.plan import Checksum
from megatron_fleet.convert.template import KEPT, LAYOUT, Template, open_template
from megatron_fleet.storage.folder import Folder
from megatron_fleet.storage.open import open_folder
from megatron_fleet.weights.checkpoint_reader import Checkpoint

RUN_CONFIG = "config.json"
MANIFEST = "manifest.json"
"""File in the checkpoints of this project's runs that lists their files with sizes and SHA-256."""


def above(url: str, levels: int) -> str:
    """The folder ``levels`` levels above an address."""
    for _ in range(levels):
        url = url.rstrip("/").rpartition("/")[0] if "://" in url else os.path.dirname(os.path.abspath(url))
    return url


def kept_template(checkpoint: Checkpoint) -> Folder | None:
    """The ``hf/`` that a conversion stored next to a checkpoint's weights; ``None`` if there is none."""
    for url in (checkpoint.folder.url, above(checkpoint.folder.url, 1)):
        folder = open_folder(f"{url.rstrip('/')}/{KEPT}")
        if LAYOUT in folder.sizes():
            return folder
    return None


def find_template(checkpoint: Checkpoint, given: Folder | Path | str | None) -> Template:
    """Find the template that identifies a checkpoint's model: ``given``, the one stored in the checkpoint, the model of
    its run, or the arguments of Megatron-LM.

    Raises:
        UserError: none of them exists, or the one found is not an HF folder.
    """
    prediction = any(key.startswith("mtp.") for key in checkpoint.index.tensors)
    if given is not None:
        return open_template(given, prediction=prediction)
    kept = kept_template(checkpoint)
    if kept is not None:
        return open_template(kept, prediction=prediction)
    path = _model_of_run(checkpoint)
    if path and _is_there(path):
        return open_template(path, prediction=prediction)
    began = f" ({path}, which its run began with, is not there)" if path else ""
    try:
        arguments = template_from_arguments(checkpoint)
        if arguments is not None:
            return arguments
    except UserError as error:
        began = began or f" ({str(error).rstrip('.')})"
    raise UserError(
        f"{checkpoint.url}: does not say which model it is{began}; give --template with the HF folder that training "
        f"began with."
    )


def _model_of_run(checkpoint: Checkpoint) -> str | None:
    """``model.path`` of the resolved configuration two levels above a run's ``checkpoints/step_…``."""
    if MANIFEST not in checkpoint.sizes:
        return None
    folder = open_folder(above(checkpoint.url, 2))
    try:
        path = json.loads(folder.read(RUN_CONFIG))["model"]["path"]
    except (UserError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return path if isinstance(path, str) else None


def _is_there(path: str) -> bool:
    """Whether ``path`` is a model folder. Does not list it: the recorded path may name any folder."""
    try:
        open_folder(path).read("config.json")
    except UserError:
        return False
    return True


def checksums(checkpoint: Checkpoint) -> tuple[Checksum, ...]:
    """Checksums from the manifest of a run's checkpoint; empty if it has none.

    Raises:
        UserError: the manifest cannot be read, or a file is missing or has another size.
    """
    if MANIFEST not in checkpoint.sizes:
        return ()
    where = f"{checkpoint.url}/{MANIFEST}"
    try:
        files = json.loads(checkpoint.read(MANIFEST))["files"]
        listed = {name: (entry["bytes"], entry["sha256"]) for name, entry in files.items()}
        if not all(type(nbytes) is int and isinstance(sha256, str) for nbytes, sha256 in listed.values()):
            raise TypeError
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UserError(f"{where}: malformed; use another checkpoint.") from None
    for name, (nbytes, _) in listed.items():
        if name not in checkpoint.sizes:
            raise UserError(
                f"{checkpoint.url}/{name}: is missing although {MANIFEST} lists it; use another checkpoint."
            )
        if checkpoint.sizes[name] != nbytes:
            raise UserError(
                f"{checkpoint.url}/{name}: has {checkpoint.sizes[name]} bytes, {MANIFEST} says {nbytes}; use another "
                f"checkpoint."
            )
    return tuple(
        Checksum(checkpoint.folder, checkpoint.path + name, nbytes, sha256) for name, (nbytes, sha256) in listed.items()
    )

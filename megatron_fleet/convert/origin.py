"""Origin of a checkpoint: the template stored with it, the run it belongs to, or the arguments of Megatron-LM in it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_fleet.config.errors import UserError
from megatron_fleet.config.remote_model import BucketModel, remote_model
from megatron_fleet.config.schema import ModelConfig
from megatron_fleet.convert.plan import Checksum
from megatron_fleet.convert.template import KEPT, LAYOUT, Template, open_template
from megatron_fleet.models.hf_config import write_config
from megatron_fleet.models.megatron_config import model_from_megatron
from megatron_fleet.models.model import Model
from megatron_fleet.models.registry import ARCHITECTURES
from megatron_fleet.storage.folder import Folder
from megatron_fleet.storage.open import open_folder
from megatron_fleet.weights.checkpoint_reader import MegatronCheckpoint
from megatron_fleet.weights.fetch import object_store
from megatron_fleet.weights.hf_model import HfModel
from megatron_fleet.weights.mapping import WeightTable
from megatron_fleet.weights.torch_dist.pickle_reader import Opaque

RUN_CONFIG = "config.json"
_HF_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
MANIFEST = "manifest.json"
"""File in the checkpoints of this project's runs that lists their files with sizes and SHA-256."""


def above(url: str, levels: int) -> str:
    """The folder ``levels`` levels above an address."""
    for _ in range(levels):
        url = url.rstrip("/").rpartition("/")[0] if "://" in url else os.path.dirname(os.path.abspath(url))
    return url


def kept_template(checkpoint: MegatronCheckpoint) -> Folder | None:
    """The ``hf/`` that a conversion stored next to a checkpoint's weights; ``None`` if there is none."""
    for url in (checkpoint.folder.url, above(checkpoint.folder.url, 1)):
        folder = open_folder(f"{url.rstrip('/')}/{KEPT}")
        if LAYOUT in folder.sizes():
            return folder
    return None


def find_template(checkpoint: MegatronCheckpoint, given: Folder | Path | str | None) -> Template:
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
        f"{checkpoint.url} does not say which model it is{began}; give --template with the HF folder that training "
        f"began with."
    )


def template_from_arguments(checkpoint: MegatronCheckpoint) -> Template | None:
    """Derive a template from a checkpoint's arguments; ``None`` if it stores none.

    It has a ``config.json``, but neither a tokenizer nor a layout of files.

    Raises:
        UserError: the arguments are incomplete, or belong to no supported family.
    """
    arguments = checkpoint.index.common.get("args")
    state = arguments.state if isinstance(arguments, Opaque) else None
    if not isinstance(state, Mapping):
        return None
    model = model_from_megatron(state)
    embedding = checkpoint.index.tensors.get("embedding.word_embeddings.weight")
    config = _config(model, "BF16" if embedding is None else embedding.dtype)
    hf = HfModel(checkpoint.folder, config, WeightTable(config, prediction=bool(model.mtp)), {}, {}, ())
    return Template(hf, {}, {}, {"config.json": (json.dumps(config, indent=2) + "\n").encode()})


def _config(model: Model, dtype: str) -> dict[str, Any]:
    """The ``config.json`` of the first family that can express the model."""
    for family in ARCHITECTURES.values():
        if family.text is None:
            try:
                return write_config(model, family, _HF_DTYPES.get(dtype, "bfloat16"))
            except (ValueError, UserError):
                continue
    raise UserError("the checkpoint's arguments fit no known model family; give --template.")


def _model_of_run(checkpoint: MegatronCheckpoint) -> str | None:
    """``model.path`` of the resolved configuration two levels above a run's ``checkpoints/step_…``."""
    if MANIFEST not in checkpoint.sizes:
        return None
    folder = open_folder(above(checkpoint.url, 2))
    try:
        path = json.loads(folder.read(RUN_CONFIG))["model"]["path"]
    except (UserError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return _folder_of_model(path) if isinstance(path, str) else None


def _folder_of_model(path: str) -> str | None:
    """Folder with the files of a run's ``model.path``: on this host, or the bucket if they were not replaced since."""
    remote, folder = remote_model(path), ModelConfig(path=path).folder
    if not isinstance(remote, BucketModel) or _is_there(folder):
        return folder
    try:
        object_store.look_up(remote)
    except UserError:  # the files were replaced, or the store does not answer
        return None
    return remote.address


def _is_there(path: str) -> bool:
    """Whether ``path`` is a model folder. Does not list it: the recorded path may name any folder."""
    try:
        open_folder(path).read("config.json")
    except UserError:
        return False
    return True


def checksums(checkpoint: MegatronCheckpoint) -> tuple[Checksum, ...]:
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
            raise UserError(f"{checkpoint.url}/{name} is missing although {MANIFEST} lists it; use another checkpoint.")
        if checkpoint.sizes[name] != nbytes:
            raise UserError(
                f"{checkpoint.url}/{name} has {checkpoint.sizes[name]} bytes, {MANIFEST} says {nbytes}; use another "
                f"checkpoint."
            )
    return tuple(
        Checksum(checkpoint.folder, checkpoint.path + name, nbytes, sha256) for name, (nbytes, sha256) in listed.items()
    )

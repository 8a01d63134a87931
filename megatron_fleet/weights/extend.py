"""Context extension: YaRN (Peng et al. 2023, arXiv:2309.00071) written to the ``config.json`` of a model folder.

Engines, trainer, checkpoints and exports all read this one file, so they cannot disagree.
"""

from __future__ import annotations

import copy
import json
import math
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_fleet.config.errors import UserError
from megatron_fleet.models.hf_config import architecture_of, read_model
from megatron_fleet.storage.local import begin_folder, commit_folder, os_errors_as_user_error, write_atomically
from megatron_fleet.weights.hf_folder import read_config

CONFIG = "config.json"
MOST_TOKENS = 1 << 30
"""Upper bound of a context length, beyond any model's."""


def extend(source: Path, target: Path, factor: float, original: int) -> int:
    """Create ``target``: links to all files of ``source``, and its own ``config.json``. All or nothing.

    Args:
        factor: extension factor.
        original: context length the model was trained on, in tokens.

    Returns:
        The new context length in tokens, factor × original.

    Raises:
        UserError: the model's context cannot be extended this way, or ``target`` exists.
    """
    with os_errors_as_user_error(target, "made"):
        if os.path.lexists(target):
            raise UserError(f"{target} already exists; name another folder or remove it.")
        raw = extended(read_config(source), factor, original)
        partial = begin_folder(target)
        try:
            _write(partial, source, raw)
            commit_folder(partial, target)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    return int(factor * original)


def _write(partial: Path, source: Path, raw: Mapping[str, Any]) -> None:
    for path in sorted(source.resolve().iterdir()):
        if path.name != CONFIG:
            (partial / path.name).symlink_to(path)
    write_atomically(partial / CONFIG, (json.dumps(raw, indent=2) + "\n").encode())


def extended(raw: Mapping[str, Any], factor: float, original: int) -> dict[str, Any]:
    """Add YaRN to a raw ``config.json``, using its own field names (of transformers 4 or 5).

    Raises:
        UserError: see ``read_model``; the positions are already scaled, or the context would not become longer.
    """
    model = read_model(raw)
    if model.rope.kind != "default":
        raise UserError(
            f"config.json: its positions are already scaled ({model.rope.kind}, factor {model.rope.factor:g}); begin "
            f"with the model as it was trained."
        )
    if not 1 < factor < math.inf or original < 1:
        raise UserError(
            f"factor={factor:g} and original={original!s:.30} do not extend the context; give a factor above 1."
        )
    if max(factor, original) > MOST_TOKENS or factor * original > MOST_TOKENS:
        raise UserError(
            f"factor={factor:g} × original={original!s:.30} are more than {MOST_TOKENS} tokens; give the factor by "
            f"which the context becomes longer, and the tokens that the model was trained on."
        )
    out = copy.deepcopy(dict(raw))
    part = architecture_of(out).text
    own: dict[str, Any] = out if part is None else out[part]
    yarn = {"rope_type": "yarn", "factor": float(factor), "original_max_position_embeddings": original}
    if own.get("rope_parameters"):
        own["rope_parameters"] = {**own["rope_parameters"], **yarn}
    else:
        own["rope_scaling"] = yarn
    context = int(factor * original)
    if model.context is not None and context <= model.context:
        raise UserError(
            f"factor={factor:g} × original={original} = {context} tokens, and the model has {model.context} as it is; "
            f"give a larger factor."
        )
    own["max_position_embeddings"] = context
    read_model(out)
    return out

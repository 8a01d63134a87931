"""Template of last resort for a Megatron-LM checkpoint: its HF model, derived from the arguments stored in it.

It has a config.json but no tokenizer, and no file layout.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from megatron_fleet.config.errors import UserError
from megatron_fleet.convert.template import Template
from megatron_fleet.models.hf_config import write_config
from megatron_fleet.models.megatron_config import model_from_megatron
from megatron_fleet.models.model import Model
from megatron_fleet.models.registry import ARCHITECTURES
from megatron_fleet.weights.checkpoint_reader import Checkpoint
from megatron_fleet.weights.hf_model import HfModel
from megatron_fleet.weights.mapping import WeightTable
from megatron_fleet.weights.torch_dist.pickle_reader import Opaque

_HF_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


def template_from_arguments(checkpoint: Checkpoint) -> Template | None:
    """Derive a template from a checkpoint's arguments; ``None`` if it stores none.

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
    raise UserError("the checkpoint's arguments are those of no model family at hand; give --template.")

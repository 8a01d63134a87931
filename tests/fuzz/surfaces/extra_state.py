"""Transformer Engine's state of a layer, as a checkpoint holds it: a pickle in a tensor of bytes."""

from __future__ import annotations

import pickle
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from fuzz import pickles
from fuzz.engine import Surface
from fuzz.trees import bytes_of

from megatron_fleet.trainer.megatron.extra_state import rebuild
from megatron_fleet.weights.torch_dist.pickle_reader import unpickle

TENSORS = ("scale_fwd", "amax_history_fwd", "scale_bwd", "amax_history_bwd")
NAMES = ("torch", "collections")
RECIPE = SimpleNamespace(DelayedScaling=lambda amax_history_len: amax_history_len)
"""In place of a package that not every machine has."""


@cache
def seeds() -> list[Any]:
    state = {name: torch.arange(4, dtype=torch.float32).reshape(2, 2) for name in TENSORS}
    whole = pickle.dumps(state | {"extra_fp8_variables": {"num_gemms": 3}, "recipe": None})
    return [{"state": whole}, {"state": {"pickle": pickles.to_tree(unpickle(whole, NAMES))}}]


def check(tree: Any, folder: Path) -> bool:
    content = tree.get("state") if isinstance(tree, dict) else tree
    if isinstance(content, dict) and list(content) == ["pickle"]:
        content = pickles.pickled(content["pickle"])
    saved = torch.frombuffer(bytearray(bytes_of(content) or b"\0"), dtype=torch.uint8)
    modules = dict.fromkeys(("transformer_engine", "transformer_engine.common"), RECIPE)
    with patch.dict(sys.modules, modules | {"transformer_engine.common.recipe": RECIPE}):
        try:
            made = rebuild(saved)
        except ValueError as error:
            assert str(error)
            return False
    return isinstance(made, torch.Tensor)


SURFACE = Surface("extra_state", 750, seeds, check, words=(*TENSORS, "extra_fp8_variables", "$call", "$name", "$tuple"))

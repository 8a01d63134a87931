"""Transformer Engine's state of delayed FP8 scaling, read from a checkpoint as tensors and numbers, never unpickled.

A module's state is a pickle in a tensor of bytes, and ``set_extra_state`` unpickles its argument
(``transformer_engine/pytorch/module/base.py``, 2.x). The content of a checkpoint is therefore read here as data, and
replaced by a new pickle of the plain parts. Other recipes store nothing there that a run needs.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from io import BytesIO
from math import prod
from typing import Any

import torch

from megatron_fleet.weights.torch_dist.pickle_reader import BadPickle, Opaque, unpickle

_TENSORS = ("scale_fwd", "amax_history_fwd", "scale_bwd", "amax_history_bwd")
_STORAGES = ("torch.storage._load_from_bytes", "megatron.core.safe_globals.safe_load_from_bytes")
"""Functions that read a storage; Megatron-Core 0.19 puts its own in the place of PyTorch's when it is imported."""
_NAMES = ("torch", "transformer_engine", "megatron", "collections", "enum")
_ALLOW = "NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE"
"""Variable without which Transformer Engine 2.20 refuses every state of delayed scaling
(``transformer_engine/pytorch/_extra_state.py``)."""


@contextmanager
def allowed() -> Iterator[None]:
    """Let Transformer Engine unpickle what is loaded in the block, which must be results of `rebuild` alone."""
    before = os.environ.get(_ALLOW)
    os.environ[_ALLOW] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_ALLOW]
        else:
            os.environ[_ALLOW] = before


def rebuild(saved: Any) -> torch.Tensor | None:
    """Build a safe replacement of ``saved`` for ``set_extra_state``; ``None`` when there is nothing to restore.

    Args:
        saved: result of a module's ``get_extra_state``: uint8 ``[N]``; anything else counts as empty.

    Raises:
        ValueError: it is not a state of delayed scaling. The message is meant to follow a file name.
    """
    if not isinstance(saved, torch.Tensor) or not saved.numel():
        return None
    state = unpickle(saved.cpu().numpy().tobytes(), _NAMES)
    if not isinstance(state, dict) or _TENSORS[0] not in state:
        return None
    from transformer_engine.common.recipe import DelayedScaling

    plain: dict[str, Any] = {name: _tensor(state.get(name)) for name in _TENSORS}
    variables = state.get("extra_fp8_variables")
    known = variables if isinstance(variables, dict) else {}
    plain["extra_fp8_variables"] = {k: v for k, v in known.items() if _is_plain(v)}
    if not plain["amax_history_fwd"].ndim:
        raise BadPickle("holds a single number for a history")
    # Replaced by the run's own at the first forward pass; until then only the length of the history matters.
    plain["recipe"] = DelayedScaling(amax_history_len=len(plain["amax_history_fwd"]))
    return torch.frombuffer(bytearray(pickle.dumps(plain)), dtype=torch.uint8)


def _tensor(made: Any) -> torch.Tensor:
    """Decode a tensor as pickled by `pickle` itself: its storage is the file of a separate `torch.save`."""
    try:
        storage, offset, shape, *_ = _arguments(made, ("torch._utils._rebuild_tensor_v2",))
        (stored,) = _arguments(storage, _STORAGES)
        values = torch.load(BytesIO(stored), map_location="cpu", weights_only=True)
        flat = torch.frombuffer(bytearray(values._untyped_storage.tolist()), dtype=values.dtype)
        return flat[offset : offset + prod(shape)].reshape(shape).clone()
    except BadPickle:
        raise
    except Exception as error:  # torch raises anything for a damaged file
        raise BadPickle(f"holds something other than a tensor ({type(error).__name__})") from None


def _arguments(made: Any, names: Collection[str]) -> tuple[Any, ...]:
    if not isinstance(made, Opaque) or made.name not in names or not isinstance(made.args, tuple):
        held = made.name if isinstance(made, Opaque) else type(made).__name__
        raise BadPickle(f"holds {held[:100]!r} where a tensor is expected")
    return made.args


def _is_plain(value: Any, depth: int = 8) -> bool:
    if isinstance(value, list | tuple):
        return depth > 0 and all(_is_plain(part, depth - 1) for part in value)
    return type(value) in (bool, int, float, str)

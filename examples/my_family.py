"""A model family of your own: `mfleet train model.family=my_family:mistral model.path=…` (see README.md)."""

from __future__ import annotations

from dataclasses import replace

from megatron_fleet.models.llama.weights import ARCHITECTURES
from megatron_fleet.models.registry import Family


def mistral() -> Family:
    """Mistral 7B from version 0.2 on: Llama's layers under another `model_type`, without a sliding window.

    Returns:
        The architectures, by which a model is read, converted and trained. Chat formats that no other family has would
        be its `formats`, and `recognise` would tell the folders of its models.
    """
    (llama,) = ARCHITECTURES
    fixed = {"hidden_act": "silu", "sliding_window": None}
    return Family((replace(llama, model_types=("mistral",), fixed=fixed),))

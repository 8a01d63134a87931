"""The ``config.json`` of a model: what it computes, its weight table, and what Megatron is told."""

from pathlib import Path
from typing import Any

from fuzz import folders
from fuzz.engine import Surface
from fuzz.outcomes import refusal_of
from tiny_configs import FAMILIES, raw_config

from megatron_fleet.models.megatron_config import megatron_arguments
from megatron_fleet.weights.extend import extended
from megatron_fleet.weights.hf_folder import read_config
from megatron_fleet.weights.mapping import WeightTable


def seeds() -> list[Any]:
    found = [raw_config(family, dialect) for family in FAMILIES for dialect in ("v4", "v5")]
    return [{"config.json": raw} for raw in found]


def check(tree: Any, folder: Path) -> bool:
    folders.write(folder, tree)
    with refusal_of("config.json"):
        raw = read_config(folder)
        table = WeightTable(raw)
        assert table.tensors and all(shape for shape in table.tensors.values())
        assert next(table.matrices()).pieces
        with refusal_of("config.json"):
            megatron_arguments(table.model)
        with refusal_of("config.json", "factor="):
            extended(raw, 4.0, 64)
        return True
    return False


SURFACE = Surface("hf_config", 750, seeds, check, words=("yarn", "llama3", "default", "qwen3", "kimi_k25", "fp8"))

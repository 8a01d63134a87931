"""A model folder: safetensors headers and index against ``config.json``, and its conversion to Megatron's format."""

from pathlib import Path
from typing import Any

from fuzz import models
from fuzz.engine import Surface
from fuzz.outcomes import refusal_of

from megatron_fleet.convert.execute import Share, execute
from megatron_fleet.convert.inspect import inspect
from megatron_fleet.convert.to_megatron import plan_to_megatron
from megatron_fleet.weights.hf_model import open_model


def seeds() -> list[Any]:
    trees = [models.folder(family, files) for family in models.FAMILIES for files in (1, 2)]
    as_bytes = [
        {name: models.safetensors_bytes(file) if name.endswith(".safetensors") else file for name, file in tree.items()}
        for tree in trees
    ]
    return trees + as_bytes


def check(tree: Any, folder: Path) -> bool:
    source, out = models.written(folder / "hf", tree), folder / "mg"
    with refusal_of(source):
        inspect(str(source)).as_json()
    with refusal_of(source, "config.json"):
        plan = plan_to_megatron(open_model(source))
        with refusal_of(source, out):
            assert execute(plan, str(out), 1, Share(), models.Silence())
            return True
    assert not out.exists()
    return False


SURFACE = Surface("hf_folder", 50, seeds, check, words=("F32", "BF16", "F8_E4M3", "I64", "model.safetensors"))

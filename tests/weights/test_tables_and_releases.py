"""The weight tables name what every release of Megatron-Core asks for; a renamed tensor fails here and not in a run."""

from __future__ import annotations

import pytest
from recorded_names import VERSIONS, megatron_names

from megatron_fleet.convert.to_megatron import address, extra_states
from megatron_fleet.weights.mapping import WeightTable

MODELS = tuple(megatron_names.MODELS)
DOUBLE_NORM = "self_attention.linear_q_proj.layer_norm_weight"
"""0.19 normalises the query's input twice when there is no compressed query; no published model does."""


def checkpoint(table: WeightTable, numbered: bool) -> tuple[dict[str, tuple[int, ...]], set[str]]:
    """Shape of every key that a converted checkpoint has, and its objects."""
    shapes: dict[str, tuple[int, ...]] = {}
    objects: set[str] = set()
    for matrix in table.matrices():
        for name in (matrix.key, *matrix.aliases):
            place = address(table.model, name, matrix.expert, numbered)
            assert shapes.setdefault(place.key, (*place.counts, *matrix.shape)) == (*place.counts, *matrix.shape)
        objects |= set(extra_states(table.model, matrix, numbered))
    return shapes, objects


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("model", MODELS)
def test_a_converted_checkpoint_has_all_that_a_release_asks_for(model, version):
    table = WeightTable(megatron_names.MODELS[model])
    for (name, variant), names in megatron_names.read(version).items():
        if name != model or names.failure:
            continue
        numbered = any(key.startswith("decoder.layers.0.") for key in names.tensors)
        shapes, objects = checkpoint(table, numbered)
        wanted = {k: t for k, t in names.tensors.items() if not k.endswith(DOUBLE_NORM)}
        assert len(names.tensors) - len(wanted) == (table.model.layers if doubled(version, model, variant) else 0)
        assert wanted.keys() <= shapes.keys(), variant
        for key, tensor in wanted.items():
            assert tensor.shape == shapes[key], key
        for key, states in names.objects.items():
            assert set(states.keys(key)) <= objects, (variant, key)


def doubled(version: str, model: str, variant: str) -> bool:
    return (tuple(map(int, version.split("."))) >= (0, 19)) and model == "moonlight" and variant != "local"


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("model", MODELS)
def test_every_parameter_of_a_release_is_found_and_nothing_is_left_over(model, version):
    table = WeightTable(megatron_names.MODELS[model])
    for (name, variant), names in megatron_names.read(version).items():
        if name != model or names.failure:
            continue
        found = set()
        for weight in names.weights.values():
            if not weight.key.endswith(DOUBLE_NORM):
                matrix = table.find(weight.key, tuple(weight.index))
                found.add((matrix.key, matrix.expert))
        assert found == {(m.key, m.expert) for m in table.matrices()}, variant


def test_numbered_and_stacked_keys_are_two_names_of_one_thing():
    table = WeightTable(megatron_names.MODELS["qwen3_moe"])
    for matrix in table.matrices():
        for numbered in (False, True):
            place = address(table.model, matrix.key, matrix.expert, numbered)
            assert table.find(place.key, place.lead) == matrix

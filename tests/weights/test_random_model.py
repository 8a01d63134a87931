"""`mfleet model make-random`: a folder that trainer, engines and chat format take."""

import json

import pytest

pytest.importorskip("torch")

import torch
from published_configs import published

from megatron_fleet.config.errors import UserError
from megatron_fleet.models.chat.detection import make_renderer
from megatron_fleet.models.chat.template_check import check_template
from megatron_fleet.models.hf_config import read_model
from megatron_fleet.weights.hf_model import open_model
from megatron_fleet.weights.random_model import QWEN3_0_6B, write_random

SMALL = dict(QWEN3_0_6B) | {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 2048}


def test_the_shape_is_qwen3_0_6b():
    assert read_model(QWEN3_0_6B) == read_model(published()["Qwen3-0.6B"])


def test_the_folder_is_a_whole_model(tmp_path):
    parameters = write_random(tmp_path / "model", SMALL)
    model = open_model(tmp_path / "model")
    stored = {tensor.dtype for tensor in model.stored.values()}
    assert stored == {"BF16"} and sum(tensor.nbytes for tensor in model.stored.values()) == 2 * parameters
    renderer = make_renderer(str(tmp_path / "model"), True, "auto")
    check_template(str(tmp_path / "model"), True)
    # What a random model samples is mostly no token of the tokenizer.
    assert renderer.tokenizer.decode([2000, 1500]) == ""
    assert json.loads((tmp_path / "model" / "config.json").read_text()) == SMALL


def test_weights_depend_on_the_seed_alone(tmp_path):
    from safetensors.torch import load_file

    one, same, other = (
        load_file(tmp_path / name / "model.safetensors")
        for name, seed in (("one", 1), ("same", 1), ("other", 2))
        if write_random(tmp_path / name, SMALL, seed)
    )
    name = "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(one[name], same[name]) and not torch.equal(one[name], other[name])
    assert 0.015 < one[name].float().std() < 0.025
    assert bool((one["model.norm.weight"] == 1).all())


def test_an_existing_folder_stays(tmp_path):
    (tmp_path / "model").mkdir()
    with pytest.raises(UserError, match="already exists"):
        write_random(tmp_path / "model", SMALL)
    assert list((tmp_path / "model").iterdir()) == []

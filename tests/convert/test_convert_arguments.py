"""Megatron-LM checkpoints that say themselves which model they are, by the arguments that they keep."""

from __future__ import annotations

import json

import pytest

torch = pytest.importorskip("torch")

from checkpoint_arguments import checkpoint_arguments  # noqa: E402
from convert_helpers import megatron_tensors, write_foreign  # noqa: E402
from tiny_models import dequantise, stored_tensors  # noqa: E402

from megatron_fleet.models.hf_config import read_model  # noqa: E402
from megatron_fleet.weights.hf_folder import read_config  # noqa: E402

FAMILIES = ("qwen2_tied", "qwen3", "qwen3_yarn", "qwen3_moe", "llama3", "deepseek_v3", "moonlight", "glm4_moe")


@pytest.mark.parametrize("family", FAMILIES)
def test_no_template_is_needed(family, made, convert, tmp_path):
    model = read_model(read_config(made(family)))
    root = write_foreign(tmp_path / "run", megatron_tensors(made(family), True), arguments=checkpoint_arguments(model))
    code, _, errors = convert("to-hf", root, tmp_path / "out")
    assert code == 0, errors
    assert read_model(read_config(tmp_path / "out")) == model
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    found, expected = dequantise(stored_tensors(tmp_path / "out")), dequantise(stored_tensors(made(family)))
    assert found.keys() == {name for name in expected if not name.endswith("inv_freq")}
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


def test_a_run_of_no_family_is_refused(made, refused, tmp_path):
    model = read_model(read_config(made("qwen3")))
    arguments = checkpoint_arguments(model) | {"add_qkv_bias": True}
    root = write_foreign(tmp_path / "run", megatron_tensors(made("qwen3"), False), arguments=arguments)
    assert "fit no known model family" in refused("to-hf", root, tmp_path / "out")

"""A model family that is defined here alone: built, converted, exported and compared with transformers.

Its feed-forward layers have another activation than those of all families at hand, and its norms multiply by
1 + weight. Run as a script, this is one rank.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rank_processes import run_ranks

pytest.importorskip("megatron_fleet.trainer.megatron")

import torch
import torch.distributed as dist
from family_ranks import LENGTHS, TOLERANCE, Layout, check, initialise
from weight_fixtures import Silence, random_tensors, write_folder

from megatron_fleet.convert.execute import Share, execute
from megatron_fleet.convert.to_hf import plan_to_hf
from megatron_fleet.convert.to_megatron import plan_to_megatron
from megatron_fleet.models import registry
from megatron_fleet.models.hf_config import read_model, write_config
from megatron_fleet.models.registry import ARCHITECTURES, register
from megatron_fleet.platform import device
from megatron_fleet.weights.hf_model import open_model

OWN = replace(
    ARCHITECTURES["llama"],
    model_types=("own",),
    given={"activation": "gelu_tanh", "zero_centered_norms": True},
    fixed={"hidden_act": "gelu_pytorch_tanh", "attention_bias": False, "mlp_bias": False},
)
CONFIG: dict[str, Any] = {
    "model_type": "own",
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "vocab_size": 515,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}


@pytest.fixture(scope="module", autouse=True)
def registered():
    register(OWN)
    yield
    del registry._ARCHITECTURES["own"]


def test_its_configuration_is_read_and_written():
    model = read_model(CONFIG)
    assert (model.activation, model.zero_centered_norms, model.head) == ("gelu_tanh", True, 24)
    written = write_config(model, OWN, "float32")
    assert written["hidden_act"] == "gelu_pytorch_tanh" and read_model(written) == model


@pytest.mark.slow
def test_its_logits_are_those_of_transformers_and_conversion_gives_it_back(tmp_path):
    tensors = {name: 1.5 * tensor for name, tensor in random_tensors(CONFIG).items()}
    hf = write_folder(tmp_path / "own" / "hf", CONFIG, tensors)
    convert(plan_to_megatron(open_model(hf)), tmp_path / "own" / "megatron")
    convert(plan_to_hf(tmp_path / "own" / "megatron", hf), tmp_path / "back")
    assert (tmp_path / "back" / "model.safetensors").read_bytes() == (hf / "model.safetensors").read_bytes()
    ids = torch.randint(0, 515, (sum(LENGTHS),), generator=torch.Generator().manual_seed(5))
    reference = {"ids": ids, "logits": logits(tensors, ids, OWN.fixed["hidden_act"])}
    torch.save(reference, tmp_path / "own" / "reference.pt")
    assert (reference["logits"] - logits(tensors, ids, "silu")).abs().max() > 100 * TOLERANCE
    (first, _) = run_ranks(Path(__file__), 2, tmp_path)
    assert "differ by at most" in first


def convert(plan: Any, out: Path) -> None:
    assert execute(plan, str(out), 2, Share(), Silence())


@torch.no_grad()
def logits(tensors: dict[str, torch.Tensor], ids: torch.Tensor, activation: str) -> torch.Tensor:
    """``[tokens, V]``, by transformers' Llama with the gains of this family's norms."""
    transformers = pytest.importorskip("transformers")
    named = {name: value for name, value in CONFIG.items() if name not in ("model_type", "torch_dtype", "hidden_act")}
    config = transformers.LlamaConfig(**named, hidden_act=activation)
    model = transformers.LlamaForCausalLM(config).eval()
    model.load_state_dict({name: tensor + ("norm" in name) for name, tensor in tensors.items()})
    return torch.cat([model(part[None]).logits[0] for part in ids.split(LENGTHS)])


def main(folder: Path) -> None:
    register(OWN)
    device.prepare(1, seed=0)
    dist.init_process_group("gloo")
    layout = Layout(tp=2, etp=2, world=2)
    initialise(layout)
    print("logits differ by at most", check(folder, "own", layout), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

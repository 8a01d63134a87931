"""The model family of examples/, named by its path: converted, built and compared with the Llama that it is.

Run as a script, this is the one rank.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rank_processes import run_ranks
from waiting import HANG_S

pytest.importorskip("megatron_fleet.trainer.megatron")

import torch
import torch.distributed as dist
from family_ranks import LENGTHS, Layout, check, initialise
from weight_fixtures import random_tensors, write_folder

from megatron_fleet.config.errors import UserError
from megatron_fleet.models import registry
from megatron_fleet.models.chat import detection
from megatron_fleet.platform import device

PATH = "my_family:mistral"
EXAMPLES = Path(__file__).parents[2] / "examples"
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 515,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
MISTRAL = LLAMA | {"model_type": "mistral", "sliding_window": None}


@pytest.fixture
def fresh(monkeypatch):
    """A process that has no family of the user's, and finds the examples."""
    known = dict(registry.ARCHITECTURES)
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.delenv(registry.FAMILY, raising=False)
    yield
    os.environ.pop(registry.FAMILY, None)
    registry.OWN_FAMILIES.clear()
    registry._ARCHITECTURES.clear()
    registry._ARCHITECTURES.update(known)


@pytest.mark.slow
def test_its_checkpoint_is_converted_and_its_logits_are_those_of_llama(tmp_path):
    tensors = random_tensors(LLAMA)
    hf = write_folder(tmp_path / "mistral" / "hf", MISTRAL, tensors)
    megatron = tmp_path / "mistral" / "megatron"
    assert "mistral" in mfleet("convert", "to-megatron", hf, megatron, status=2)
    mfleet("convert", "to-megatron", "--family", PATH, hf, megatron)
    mfleet("convert", "to-hf", "--family", PATH, megatron, tmp_path / "back")
    assert (tmp_path / "back" / "model.safetensors").read_bytes() == (hf / "model.safetensors").read_bytes()
    ids = torch.randint(0, 515, (sum(LENGTHS),), generator=torch.Generator().manual_seed(5))
    torch.save({"ids": ids, "logits": logits(tensors, ids)}, tmp_path / "mistral" / "reference.pt")
    (said,) = run_ranks(Path(__file__), 1, tmp_path)
    assert "differ by at most" in said


def mfleet(*arguments: object, status: int = 0) -> str:
    """Run the command line in the folder of the examples; what it said on stderr."""
    program = "import sys; from megatron_fleet import cli; sys.exit(cli.main(sys.argv[1:]))"
    command = [sys.executable, "-c", program, *map(str, arguments)]
    done = subprocess.run(command, cwd=EXAMPLES, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == status, done.stderr
    return done.stderr


@torch.no_grad()
def logits(tensors: dict[str, torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
    """``[tokens, V]``, by transformers' Llama."""
    transformers = pytest.importorskip("transformers")
    named = {name: value for name, value in LLAMA.items() if name not in ("model_type", "torch_dtype")}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**named)).eval()
    model.load_state_dict(tensors)
    return torch.cat([model(part[None]).logits[0] for part in ids.split(LENGTHS)])


def test_children_know_it_by_the_environment(fresh):
    registry.use_family(PATH)
    assert registry.family_environment(PATH) == {registry.FAMILY: os.environ[registry.FAMILY]}
    program = "from megatron_fleet.models.registry import ARCHITECTURES; print('mistral' in ARCHITECTURES)"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=EXAMPLES, capture_output=True, text=True, timeout=HANG_S, check=True)
    assert done.stdout == "True\n"


def test_none_changes_nothing(fresh):
    registry.use_family(None)
    assert registry.family_environment(None) == {} and registry.FAMILY not in os.environ
    assert "mistral" not in registry.ARCHITECTURES


def test_what_is_no_family_is_refused(fresh, tmp_path, monkeypatch):
    (tmp_path / "no_family.py").write_text("def own(): return 5")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match=r"^model\.family=no_family:own returned int; it must return a Family\.$"):
        registry.use_family("no_family:own")


def test_its_chat_format_has_a_name_and_is_recognised(fresh, monkeypatch):
    chat = detection.FORMATS["qwen2.5"]
    family = registry.Family((), {"own-format": chat}, lambda folder: "own-format")
    monkeypatch.setitem(registry.OWN_FAMILIES, "some:family", family)
    assert detection._formats()["own-format"] is chat
    assert detection.detect(EXAMPLES, SimpleNamespace(special={}), None) == "own-format"


def main(folder: Path) -> None:
    sys.path.append(str(EXAMPLES))
    registry.use_family(PATH)
    device.prepare(1, seed=0)
    dist.init_process_group("gloo")
    layout = Layout()
    initialise(layout)
    print("logits differ by at most", check(folder, "mistral", layout), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

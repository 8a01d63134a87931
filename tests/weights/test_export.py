"""The exported folder: complete, loadable, equal, and never half there."""

from __future__ import annotations

import json
import os

import pytest

torch = pytest.importorskip("torch")

from weight_fixtures import (  # noqa: E402
    random_tensors,
    run_ranks,
    stage_chunks,
    tiny_config,
    write_folder,
)

from megatron_fleet.config.errors import UserError  # noqa: E402
from megatron_fleet.models.hf_config import is_quantized  # noqa: E402
from megatron_fleet.platform.communicator import Alone  # noqa: E402
from megatron_fleet.weights import export as export_module  # noqa: E402
from megatron_fleet.weights.exchange import Place  # noqa: E402
from megatron_fleet.weights.export import export_hf  # noqa: E402
from megatron_fleet.weights.hf_model import open_model  # noqa: E402
from megatron_fleet.weights.shards import load_hf  # noqa: E402
from megatron_fleet.weights.source import MegatronWeightSource  # noqa: E402

pytestmark = pytest.mark.usefixtures("groups")


def make_source(folder, config, comm=None, tp=1, dtype=torch.float32):
    comm = comm or Alone()
    chunks = stage_chunks(config, (comm.rank % tp, tp), comm.rank // tp, comm.size // tp)
    load_hf(chunks, folder)
    return MegatronWeightSource(chunks, config, dtype=dtype, place=Place(0, comm))


@pytest.mark.parametrize("tied", [False, True])
def test_transformers_loads_it_with_equal_logits(tmp_path, tied):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.Qwen3Config(**{k: v for k, v in tiny_config().items() if k != "tie_word_embeddings"})
    config.tie_word_embeddings = tied
    before = transformers.Qwen3ForCausalLM(config)
    before.save_pretrained(tmp_path / "hf")
    (tmp_path / "hf" / "tokenizer.json").write_text('{"version": "1.0"}')
    raw = json.loads((tmp_path / "hf" / "config.json").read_text())

    def body(comm):
        export_hf(make_source(tmp_path / "hf", raw, comm, tp=2), tmp_path / "hf", tmp_path / "out", world=comm)

    assert run_ranks(4, body) == [None] * 4
    after = transformers.Qwen3ForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    tokens = torch.arange(60).view(2, 30)
    assert torch.equal(after(tokens).logits, before(tokens).logits)
    assert (tmp_path / "out" / "tokenizer.json").read_text() == '{"version": "1.0"}'
    assert (tmp_path / "out" / "generation_config.json").exists()


@pytest.mark.parametrize("text", [False, True])
def test_an_export_of_a_quantised_folder_says_what_it_is(tmp_path, text):
    """The weights are whole again, so a reader must not look for scales."""
    config, quantised = tiny_config(), {"quant_method": "fp8", "weight_block_size": [128, 128]}
    folder = write_folder(tmp_path / "hf", config, random_tensors(config))
    source = make_source(folder, config)
    declared = {"text_config": {"quantization_config": quantised}} if text else {"quantization_config": quantised}
    (folder / "config.json").write_text(json.dumps(config | declared))
    export_hf(source, folder, tmp_path / "out", world=Alone())
    assert not is_quantized(json.loads((tmp_path / "out" / "config.json").read_text()))
    assert is_quantized(json.loads((folder / "config.json").read_text()))


def test_large_models_are_sharded_with_an_index(tmp_path):
    config = tiny_config()
    tensors = random_tensors(config)
    folder = write_folder(tmp_path / "hf", config, tensors, files=2)
    export_hf(make_source(folder, config), folder, tmp_path / "out", world=Alone(), shard_bytes=40_000)
    files = sorted(p.name for p in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 1
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert all(p.stat().st_size < 44_000 for p in (tmp_path / "out").glob("*.safetensors"))
    open_model(tmp_path / "out")
    before = os.umask(0o077)
    try:
        export_hf(make_source(folder, config), folder, tmp_path / "private", world=Alone())
    finally:
        os.umask(before)
    assert {p.stat().st_mode & 0o777 for p in (tmp_path / "private").iterdir()} == {0o600}
    assert {p.stat().st_mode & 0o777 for p in (tmp_path / "out").iterdir()} == {0o666 & ~before}
    assert {n: torch.equal(t, tensors[n]) for n, t in make_source(tmp_path / "out", config)} == dict.fromkeys(
        tensors, True
    )
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())


def test_config_tells_the_exported_dtype(tmp_path):
    config = tiny_config()
    folder = write_folder(tmp_path / "hf", config, random_tensors(config))
    export_hf(make_source(folder, config, dtype=torch.bfloat16), folder, tmp_path / "out", world=Alone())
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == config | {"torch_dtype": "bfloat16"}


def test_an_earlier_export_is_replaced_and_nothing_else_remains(tmp_path):
    config = tiny_config()
    folder = write_folder(tmp_path / "hf", config, random_tensors(config))
    (folder / "README.md").write_text("the base model's card")
    source = make_source(folder, config)
    export_hf(source, folder, tmp_path / "out", world=Alone(), shard_bytes=40_000)
    (tmp_path / ".out.partial").mkdir()
    (tmp_path / ".out.partial" / "of-a-killed-export").touch()
    export_hf(source, folder, tmp_path / "out", world=Alone())
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf", "out"]


def test_a_foreign_folder_is_not_replaced(tmp_path):
    config = tiny_config()
    folder = write_folder(tmp_path / "hf", config, random_tensors(config))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("precious")
    with pytest.raises(UserError, match="not an HF folder"):
        export_hf(make_source(folder, config), folder, tmp_path / "out", world=Alone())
    assert (tmp_path / "out" / "thesis.tex").exists()


def test_a_full_disk_fails_every_rank_and_leaves_no_folder(tmp_path, monkeypatch):
    config = tiny_config()
    folder = write_folder(tmp_path / "hf", config, random_tensors(config))

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(export_module, "save_file", full)

    def body(comm):
        export_hf(make_source(folder, config, comm, tp=2), folder, tmp_path / "out", world=comm, shard_bytes=40_000)

    results = run_ranks(4, body)
    assert all("No space left on device" in str(r) for r in results), results
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf"]

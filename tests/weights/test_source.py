"""Megatron shards → HF tensors: gathered and written in place, over simulated ranks."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from weight_fixtures import (  # noqa: E402
    random_tensors,
    run_ranks,
    stage_chunks,
    tiny_config,
    write_folder,
)

from megatron_fleet.weight_sync.buckets import BucketLayout, view_in  # noqa: E402
from megatron_fleet.weights.exchange import AsHeld, FormattedSource, Place, layer_groups  # noqa: E402
from megatron_fleet.weights.shards import load_hf  # noqa: E402
from megatron_fleet.weights.source import MegatronWeightSource  # noqa: E402

pytestmark = pytest.mark.usefixtures("groups")
LAYOUTS = [(tp, pp) for tp in (1, 2, 4) for pp in (1, 2)]


def make_source(folder, config, comm, tp, pp, dtype=torch.float32, model_dtype=torch.float32):
    chunks = stage_chunks(config, (comm.rank % tp, tp), comm.rank // tp, pp, model_dtype)
    load_hf(chunks, folder)
    return MegatronWeightSource(chunks, config, dtype=dtype, place=Place(0, comm))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("tp", "pp"), LAYOUTS)
def test_round_trip_is_bit_identical_on_every_rank(tmp_path, tp, pp, tied):
    config = tiny_config(tie_word_embeddings=tied)
    tensors = random_tensors(config, torch.bfloat16)
    tensors["model.norm.weight"][0] = -0.0
    folder = write_folder(tmp_path / "hf", config, tensors)

    def body(comm):
        source = make_source(folder, config, comm, tp, pp, torch.bfloat16, torch.bfloat16)
        first, second = list(source), list(source)
        assert [(m.name, m.dtype, m.shape) for m in source.metadata()] == [
            (n, t.dtype, tuple(t.shape)) for n, t in first
        ]
        assert all(torch.equal(a, b) for (_, a), (_, b) in zip(first, second, strict=True))
        return dict(first)

    for gathered in run_ranks(tp * pp, body):
        assert not isinstance(gathered, Exception), gathered
        assert list(gathered) == list(tensors)
        for name, tensor in tensors.items():
            assert torch.equal(gathered[name].view(torch.int16), tensor.view(torch.int16)), name


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("tp", "pp"), LAYOUTS)
def test_write_local_fills_the_memory_without_overlap(tmp_path, tp, pp, tied):
    config = tiny_config(tie_word_embeddings=tied)
    tensors = random_tensors(config)
    folder = write_folder(tmp_path / "hf", config, tensors)

    def body(comm):
        source = make_source(folder, config, comm, tp, pp)
        layout = BucketLayout([source.metadata()])
        memory = torch.zeros(layout.end, dtype=torch.uint8)
        FormattedSource(source, AsHeld()).write_local(tensors, dict(layout.tensors(0, memory)))
        return memory, layout

    results = run_ranks(tp * pp, body)
    memories = [memory for memory, _ in results]
    assert (torch.stack([m != 0 for m in memories]).sum(0) <= 1).all()
    whole = torch.stack(memories).sum(0, dtype=torch.uint8)
    slots = results[0][1].buckets[0]
    assert [slot.meta.name for slot in slots] == list(tensors)
    for slot in slots:
        assert torch.equal(view_in(whole, slot.offset, slot.meta), tensors[slot.meta.name]), slot.meta.name


def test_every_pass_reads_the_parameters_anew(tmp_path):
    config = tiny_config()
    folder = write_folder(tmp_path / "hf", config, random_tensors(config))

    def body(comm):
        chunks = stage_chunks(config, (0, 1), 0, 1)
        load_hf(chunks, folder)
        source = MegatronWeightSource(chunks, config, dtype=torch.float32, place=Place(0, comm))
        norm = chunks[0].of("decoder.final_layernorm.weight")
        norm.data = torch.full_like(norm, 3)  # moved, as data-parallel wrappers and offloading do
        return dict(source)["model.norm.weight"]

    (norm,) = run_ranks(1, body)
    assert (norm == 3).all()


def test_groups_are_the_layers_in_order(tmp_path):
    config = tiny_config()
    folder = write_folder(tmp_path / "hf", config, random_tensors(config))
    (source,) = run_ranks(1, lambda comm: make_source(folder, config, comm, 1, 1))
    assert [len(g) for g in source.groups()] == [1, 11, 11, 11, 11, 2]
    assert [name for group in source.groups() for name in group] == [m.name for m in source.metadata()]


@pytest.mark.parametrize(
    "names",
    [
        ["model.embed_tokens.weight", "model.layers.0.a", "model.layers.1.a", "model.norm.weight", "lm_head.weight"],
        ["m.embed", "m.layers.0.a", "m.layers.0.mlp.experts.7.up", "m.norm", "lm_head", "m.layers.1.eh_proj"],
        ["v.blocks.1.a", "proj.weight", "v.blocks.0.a", "m.embed", "m.layers.10.a", "m.layers.2.a", "m.norm"],
        ["only"],
    ],
)
def test_groups_are_numbered_as_vllm_does(names):
    base = pytest.importorskip("vllm.distributed.weight_transfer.base")
    assert layer_groups(names) == base.layerwise_groups(names)


def test_a_missing_stage_is_refused_on_every_rank(tmp_path):
    config = tiny_config()
    folder = write_folder(tmp_path / "hf", config, random_tensors(config))

    def body(comm):
        chunks = stage_chunks(config, (0, 1), 0, 2)
        load_hf(chunks, folder)
        return MegatronWeightSource(chunks, config, dtype=torch.float32, place=Place(model=comm))

    for result in run_ranks(2, body):
        assert isinstance(result, ValueError)
        assert "model.layers.2.input_layernorm.weight: 0 of 32" in str(result)

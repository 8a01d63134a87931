"""Megatron shards → HF tensors: gathered and written in place, over simulated ranks."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from weight_fixtures import random_tensors, run_ranks, stage_chunks, tiny_config, write_folder  # noqa: E402

from megatron_fleet.weights.load import load_hf  # noqa: E402
from megatron_fleet.weights.publish import place  # noqa: E402
from megatron_fleet.weights.source import MegatronWeightSource, Shard, view_in  # noqa: E402

LAYOUTS = [(tp, pp) for tp in (1, 2, 4) for pp in (1, 2)]


def make_source(folder, config, comm, tp, pp, dtype=torch.float32, model_dtype=torch.float32):
    chunks = stage_chunks(config, tp, comm.rank // tp, pp, dtype=model_dtype)
    load_hf(chunks, folder, tp_rank=comm.rank % tp, tp_size=tp)
    return MegatronWeightSource(chunks, config, dtype=dtype, shard=Shard(comm.rank % tp, tp, 0, comm))


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
def test_write_local_fills_the_buffer_without_overlap(tmp_path, tp, pp, tied):
    config = tiny_config(tie_word_embeddings=tied)
    tensors = random_tensors(config)
    folder = write_folder(tmp_path / "hf", config, tensors)

    def body(comm):
        source = make_source(folder, config, comm, tp, pp)
        offsets, size = place(source.metadata())
        buffer = torch.zeros(size, dtype=torch.uint8)
        source.write_local(buffer, offsets)
        return buffer, offsets

    results = run_ranks(tp * pp, body)
    buffers = [buffer for buffer, _ in results]
    assert (torch.stack([b != 0 for b in buffers]).sum(0) <= 1).all()
    whole = torch.stack(buffers).sum(0, dtype=torch.uint8)
    for name, tensor in tensors.items():
        assert torch.equal(view_in(whole, results[0][1][name], torch.float32, tensor.shape), tensor), name


def test_every_pass_reads_the_parameters_anew(tmp_path):
    config = tiny_config()
    folder = write_folder(tmp_path / "hf", config, random_tensors(config))

    def body(comm):
        source = make_source(folder, config, comm, 1, 1)
        with torch.no_grad():
            source._parameters["decoder.final_layernorm.weight"].fill_(3)
        return dict(source)["model.norm.weight"]

    (norm,) = run_ranks(1, body)
    assert (norm == 3).all()


def test_groups_are_the_layers(tmp_path):
    config = tiny_config()
    folder = write_folder(tmp_path / "hf", config, random_tensors(config))
    (groups,) = run_ranks(1, lambda comm: make_source(folder, config, comm, 1, 1).groups())
    assert [len(g) for g in groups] == [1, 11, 11, 11, 11, 1, 1]


def test_a_missing_stage_is_refused_on_every_rank(tmp_path):
    config = tiny_config()
    folder = write_folder(tmp_path / "hf", config, random_tensors(config))

    def body(comm):
        chunks = stage_chunks(config, 1, 0, 2)
        load_hf(chunks, folder, tp_rank=0, tp_size=1)
        return MegatronWeightSource(chunks, config, dtype=torch.float32, shard=Shard(model=comm))

    for result in run_ranks(2, body):
        assert isinstance(result, ValueError)
        assert "model.layers.2.input_layernorm.weight: 0 of 32" in str(result)

"""What a pass gives to the model of one rank, alone and with context parallelism, and what it takes from it."""

from __future__ import annotations

import pytest

pytest.importorskip("megatron_fleet.trainer.megatron")

import numpy as np
import torch
from megatron.core import parallel_state
from policy_fixtures import make_batch
from torch import nn

from megatron_fleet.trainer.megatron import step
from megatron_fleet.trainer.packing.pack import pack_micro_batch

SETTINGS = step.Settings(0.7, 50)
CPU = torch.device("cpu")


class Dense(nn.Module):
    """A stage without experts."""

    def __init__(self):
        super().__init__()
        self.decoder = nn.Module()
        self.decoder.layers = nn.ModuleList()


def packed(width=160, align=1, count=3):
    return pack_micro_batch(make_batch(count=count, longest=40), width, align)


def inputs_of(micro_batch, monkeypatch, ranks):
    monkeypatch.setattr(parallel_state, "get_context_parallel_world_size", lambda: ranks)
    found = []
    for rank in range(ranks):
        monkeypatch.setattr(parallel_state, "get_context_parallel_rank", lambda rank=rank: rank)
        found.append(step.model_inputs(micro_batch, Dense(), SETTINGS, CPU))
    return found


def test_one_rank_gets_all_tokens(monkeypatch):
    micro_batch = packed()
    (found,) = inputs_of(micro_batch, monkeypatch, 1)
    query = found["query"]
    assert torch.equal(found["input_ids"], micro_batch.tokens[None])
    assert torch.equal(found["position_ids"], micro_batch.positions[None])
    assert torch.equal(found["padding"], ~micro_batch.real[None]) and 0 < found["padding"].sum() < 160
    assert torch.equal(query.positions, micro_batch.trained) and torch.equal(query.targets, micro_batch.targets)
    assert query.places.tolist() == list(range(query.count)) and query.count == len(micro_batch.trained) > 10
    assert (query.temperature, query.chunk) == (0.7, 50)
    assert found["packed_seq_params"].routing is None


@pytest.mark.parametrize(("ranks", "filler"), [(2, True), (2, False), (4, True)])
def test_ranks_share_tokens_and_answers_and_each_answer_is_of_its_token(monkeypatch, ranks, filler):
    batch, align = make_batch(count=3, longest=40), 2 * ranks
    width = sum(-(-len(datum) // align) * align for datum in batch) + (4 * align if filler else 0)
    micro_batch = pack_micro_batch(batch, width, align)
    assert (micro_batch.filler > 0) == filler
    found = inputs_of(micro_batch, monkeypatch, ranks)
    assert [each["input_ids"].shape for each in found] == [(1, width // ranks)] * ranks
    places = torch.cat([each["query"].places for each in found])
    assert sorted(places.tolist()) == list(range(len(micro_batch.trained)))
    assert all(len(each["query"].places) for each in found)
    tokens, real = [], 0
    for each in found:
        query = each["query"]
        at = micro_batch.trained[query.places]
        assert query.count == len(micro_batch.trained)
        assert torch.equal(each["input_ids"][0, query.positions], micro_batch.tokens[at])
        assert torch.equal(each["position_ids"][0, query.positions], micro_batch.positions[at])
        assert torch.equal(query.targets, micro_batch.targets[query.places])
        assert not each["padding"][0, query.positions].any()
        tokens += zip(each["input_ids"][0].tolist(), each["position_ids"][0].tolist(), strict=True)
        real += int((~each["padding"]).sum())
    assert sorted(tokens) == sorted(zip(micro_batch.tokens.tolist(), micro_batch.positions.tolist(), strict=True))
    assert real == micro_batch.real_tokens


@pytest.mark.parametrize("width", [None, 160])
def test_sequences_end_where_they_do_and_the_filler_is_one_more(width):
    batch = make_batch(count=3, longest=40)
    lengths = [len(datum) for datum in batch]
    micro_batch = pack_micro_batch(batch, width or sum(lengths))
    params = step.micro_batch_params(micro_batch, CPU)
    pieces = lengths + ([160 - sum(lengths)] if width else [])
    assert params.cu_seqlens_q.tolist() == params.cu_seqlens_kv.tolist() == np.cumsum([0, *pieces]).tolist()
    assert params.cu_seqlens_q.dtype == torch.int32 and params.qkv_format == "thd"
    assert params.max_seqlen_q == params.max_seqlen_kv == max(pieces)
    assert params.lengths == tuple(lengths) and params.filler == (pieces[3] if width else 0)


def test_a_loss_gets_the_fields_of_its_tokens():
    micro_batch = packed()
    outputs = torch.randn(len(micro_batch.trained)), torch.rand(len(micro_batch.trained))
    found = step.loss_inputs(micro_batch, outputs)
    assert found.sequences == 3 and found.logprobs is outputs[0] and found.entropy is outputs[1]
    for name in ("loss_scale", "scaled_advantages", "behaviour", "sequence"):
        assert torch.equal(getattr(found, name), getattr(micro_batch, name)), name
    empty = pack_micro_batch([], 8)
    assert step.loss_inputs(empty, (torch.empty(0), torch.empty(0))).sequences == 0


class Stages:
    """Communicator of one process, which has a peer with other values."""

    def __init__(self, group=None):
        self.size, self.rank = 1, 0

    def sum_(self, table):
        table += table.clone()

    def broadcast_value(self, value, source):
        assert source == 0
        return value


def test_sums_are_over_micro_batches_and_data_parallel_ranks(monkeypatch):
    monkeypatch.setattr(step, "TorchCommunicator", Stages)
    for name in ("get_data_parallel_group", "get_pipeline_model_parallel_group"):
        monkeypatch.setattr(parallel_state, name, lambda: None)
    monkeypatch.setattr(parallel_state, "is_pipeline_last_stage", lambda: True)
    sums = [{"b": torch.tensor(1.5), "a": torch.tensor(2.0)}, {"a": torch.tensor(1 / 3), "b": torch.tensor(-4.0)}]
    found = step.reduce_sums(sums, {"tokens": 7, "padded": 2**25 + 1})
    assert found == {"a": pytest.approx(2 * (2 + 1 / 3), rel=1e-7), "b": -5.0, "tokens": 14.0, "padded": 2.0**26 + 2}
    monkeypatch.setattr(parallel_state, "is_pipeline_last_stage", lambda: False)
    assert step.reduce_sums([], {"tokens": 7}) == {}  # what the last stage has is sent to this one

"""The reference policy's weights: exchanged with the model's in blocks, one copy in host memory."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest

pytest.importorskip("megatron_fleet.trainer.megatron")

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_fleet.trainer.megatron import offload
from megatron_fleet.trainer.megatron.reference import Reference

BLOCK = 96


class Chunk(nn.Module):
    """Parameters as Megatron keeps them: views of one buffer, one tied, a frozen one, and a router's bias."""

    def __init__(self, seed):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        whole = torch.randn(90, generator=generator)
        self.first = nn.Parameter(whole[:40].view(8, 5))
        self.second = nn.Parameter(whole[40:64].view(4, 6))
        self.tied = self.first
        self.frozen = nn.Parameter(torch.randn(7, generator=generator).bfloat16(), requires_grad=False)
        self.register_buffer("expert_bias", torch.randn(3, generator=generator))
        self.register_buffer("counts", torch.zeros(3))

    def values(self):
        return [t.detach().clone() for t in (self.first, self.second, self.frozen, self.expert_bias)]

    @torch.no_grad()
    def update(self):
        for tensor in (self.first, self.second, self.expert_bias):
            tensor.mul_(3).add_(1)
        self.counts += 1


class Copies(TorchDispatchMode):
    """Bytes that operations inside write into existing tensors, and bytes that they allocate."""

    def __init__(self):
        super().__init__()
        self.copied = self.allocated = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        aten = torch.ops.aten
        if func is aten.copy_.default:
            self.copied += args[0].nbytes
        elif func in (aten.clone.default, aten._to_copy.default, aten.empty.memory_format):
            self.allocated += result.nbytes
        return result


@pytest.fixture
def kept(monkeypatch):
    monkeypatch.setattr(offload, "BLOCK_BYTES", BLOCK)
    chunks = [Chunk(0), Chunk(1)]
    reference = Reference(chunks)
    expected = [chunk.values() for chunk in chunks]
    for chunk in chunks:
        chunk.update()
    return chunks, reference, expected


def assert_equal(chunks, expected):
    for chunk, values in zip(chunks, expected, strict=True):
        for got, wanted in zip(chunk.values(), values, strict=True):
            assert torch.equal(got, wanted)


def test_a_pass_sees_the_kept_values_and_then_the_model_has_its_own(kept):
    chunks, reference, expected = kept
    for updates in range(1, 4):
        trained = [chunk.values() for chunk in chunks]
        places = [chunk.first.data_ptr() for chunk in chunks]
        with reference.in_place():
            assert_equal(chunks, expected)
            assert all(chunk.counts.eq(updates).all() for chunk in chunks)  # no part of a policy
        assert_equal(chunks, trained)
        assert [chunk.first.data_ptr() for chunk in chunks] == places  # still views of Megatron's buffers
        for chunk in chunks:
            chunk.update()


def test_an_exception_leaves_the_models_own_values(kept):
    chunks, reference, expected = kept
    trained = [chunk.values() for chunk in chunks]
    with pytest.raises(KeyError), reference.in_place():
        raise KeyError
    assert_equal(chunks, trained)
    with reference.in_place():
        assert_equal(chunks, expected)


def test_host_memory_holds_the_model_once_and_a_pass_adds_two_blocks(kept):
    _, reference, _ = kept
    size = 2 * (90 * 4 + 7 * 2 + 3 * 4)
    assert reference.nbytes == size
    with Copies() as counted, reference.in_place():
        pass
    assert counted.copied == 2 * 3 * size  # aside, in, and out; there and back
    assert counted.allocated == 2 * 2 * BLOCK
    assert reference.nbytes == size


class Lane:
    """A stream that keeps what it waits for."""

    def __init__(self, log):
        self.log, self.recorded = log, 0

    def record_event(self):
        self.recorded += 1
        return SimpleNamespace(lane=self, number=self.recorded)

    def wait_event(self, event):
        self.log.append((self, event.lane, event.number))

    def synchronize(self):
        self.log.append((self, None, self.recorded))


def test_on_cuda_no_block_is_used_again_before_it_has_left(kept, monkeypatch):
    chunks, reference, expected = kept
    log = []
    coming, leaving = Lane(log), Lane(log)
    reference._lanes = coming, leaving
    monkeypatch.setattr(torch.cuda, "stream", lambda lane: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda where: log.clear())
    trained = [chunk.values() for chunk in chunks]
    with reference.in_place():
        assert_equal(chunks, expected)
        blocks = leaving.recorded
        assert blocks == coming.recorded > 4
        # The copy to the host follows the fill; the third block and all later ones wait for the block two before.
        of_leaving, of_coming = ([e[1:] for e in log if e[0] is lane] for lane in (leaving, coming))
        assert of_leaving == [(coming, i + 1) for i in range(blocks)] + [(None, blocks)]
        assert of_coming == [(leaving, i + 1) for i in range(blocks - 2)] + [(None, blocks)]
    assert_equal(chunks, trained)


class Quantised(torch.Tensor):
    """A parameter whose memory only its library knows."""


def test_quantised_parameters_are_copied_as_values():
    chunk = Chunk(0)
    chunk.odd = nn.Parameter(torch.ones(4).as_subclass(Quantised), requires_grad=False)
    assert type(chunk.odd.data) is Quantised
    reference = Reference([chunk])
    with torch.no_grad():
        chunk.odd.mul_(5)
    with reference.in_place():
        assert chunk.odd.tolist() == [1] * 4
    assert chunk.odd.tolist() == [5] * 4

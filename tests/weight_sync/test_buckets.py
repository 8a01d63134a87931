"""Buckets: where tensors lie, what a checksum sees, and how sources are cut into them."""

from __future__ import annotations

import time

import pytest

torch = pytest.importorskip("torch")

from waiting import wait_until  # noqa: E402

from megatron_fleet.config.errors import UserError  # noqa: E402
from megatron_fleet.weight_sync.broadcast.group import DamagedBucket, pack, unpack  # noqa: E402
from megatron_fleet.weight_sync.buckets import (  # noqa: E402
    BucketLayout,
    checksum,
    make_buckets,
    parse_buckets,
    prefetch,
    stream_buckets,
)
from megatron_fleet.weight_sync.shm.board import Board  # noqa: E402
from megatron_fleet.weight_sync.shm.sender import SharedLayout, parse_layout  # noqa: E402
from megatron_fleet.weights.exchange import ParamMeta  # noqa: E402

METAS = [
    [ParamMeta("a", torch.float32, (3,)), ParamMeta("b", torch.bfloat16, (200,))],
    [ParamMeta("c", torch.int8, (1,))],
]


def test_places_are_aligned_and_disjoint():
    layout = SharedLayout(METAS, 2, scratch_bytes=100)
    start = layout.spans[0][0]
    assert start % 256 == 0 and start >= Board.nbytes(2, 2)
    assert [[slot.offset - start for slot in bucket] for bucket in layout.buckets] == [[0, 256], [768]]
    assert [(a - start, b - start) for a, b in layout.spans] == [(0, 768), (768, 1024)]
    assert (layout.scratch - start, layout.nbytes - start) == (1024, 1124)
    again = parse_layout(layout.describe())
    assert (again.buckets, again.spans, again.nbytes) == (layout.buckets, layout.spans, layout.nbytes)


def test_a_description_that_contradicts_itself_is_refused():
    described = BucketLayout(METAS).describe()
    with pytest.raises(ValueError, match="buckets of 4 tensors and 3 names"):
        parse_buckets(**described | {"buckets": [2, 2]})


def test_the_checksum_sees_every_word_and_where_blocks_lie():
    generator = torch.Generator().manual_seed(0)
    memory = torch.randint(256, (5 * 32768 + 808,), dtype=torch.uint8, generator=generator)
    whole = checksum(memory)
    assert 0 <= whole < 2**64
    for at in (0, 7, 40_000, len(memory) - 1):
        for bit in (1, 128):
            memory[at] ^= bit
            assert checksum(memory) != whole
            memory[at] ^= bit
    assert checksum(memory) == whole
    blocks = memory[: 5 * 32768].view(5, -1)
    assert checksum(torch.cat([blocks[[1, 0, 2, 3, 4]].flatten(), memory[5 * 32768 :]])) != whole
    assert checksum(torch.zeros(0, dtype=torch.uint8)) == 0


def test_a_packed_bucket_comes_out_as_it_went_in_or_not_at_all():
    layout = BucketLayout(METAS)
    for seed in range(20):  # checksums with and without the highest bit
        torch.manual_seed(seed)
        tensors = [torch.randn(3), torch.randn(200).bfloat16()]
        memory = pack(layout, 0, tensors, torch.device("cpu"))
        found = dict(unpack(layout, 0, memory))
        assert torch.equal(found["a"], tensors[0]) and torch.equal(found["b"], tensors[1])
    memory[300] ^= 1
    with pytest.raises(DamagedBucket, match="bucket 0"):
        unpack(layout, 0, memory)
    (only,) = unpack(layout, 1, pack(layout, 1, [torch.tensor([-5], dtype=torch.int8)], torch.device("cpu")))
    assert only[0] == "c" and only[1].tolist() == [-5]


def test_no_layer_is_split():
    sizes = [300, 40, 20, 50, 10, 70, 5]
    groups = [[ParamMeta(f"{i}.{k}", torch.uint8, (n << 20,)) for k in range(2)] for i, n in enumerate(sizes)]
    buckets = [[meta.name for meta in bucket] for bucket in make_buckets(groups)]
    assert [sorted({name[0] for name in b}) for b in buckets] == [["0"], ["1"], ["2"], ["3"], ["4"], ["5"], ["6"]]
    assert [name for bucket in buckets for name in bucket] == [meta.name for group in groups for meta in group]
    small = [[ParamMeta(str(i), torch.uint8, (24 << 20,))] for i in range(6)]
    assert [[meta.name for meta in bucket] for bucket in make_buckets(small)] == [["0", "1"], ["2", "3"], ["4", "5"]]


class Source:
    def __init__(self, names="abc"):
        self.names, self.taken = names, 0

    def __iter__(self):
        for name in self.names:
            self.taken += 1
            yield name, torch.tensor([float(ord(name))])


A, B, C = (ParamMeta(name, torch.float32, (1,)) for name in "abc")
BUCKETS = [[A, B], [C]]


def test_a_source_is_read_once_and_cut_into_its_buckets():
    seen = []
    stream_buckets(Source(), BUCKETS, lambda k, tensors: seen.append((k, [t.item() for t in tensors])))
    assert seen == [(0, [97.0, 98.0]), (1, [99.0])]


@pytest.mark.parametrize("wrong", ["consumer", "order"])
def test_a_source_is_read_to_its_end_whatever_fails(wrong):
    """Other ranks read it in lockstep."""
    source = Source("abc" if wrong == "consumer" else "bac")
    consumed = []

    def consume(number, tensors):
        consumed.append(number)
        raise UserError("the disk is full")

    with pytest.raises(UserError if wrong == "consumer" else ValueError, match=r"disk is full|yields b, and a"):
        stream_buckets(source, BUCKETS, consume)
    assert source.taken == 3 and consumed == ([0] if wrong == "consumer" else [])


def test_prefetch_is_one_ahead_in_order_and_stops_with_its_consumer():
    made = []

    def make(number):
        made.append(number)
        if number == 4:
            raise ValueError("no 4")
        return number

    items = prefetch(make, 10)
    assert next(items) == 0
    wait_until(lambda: len(made) >= 2)
    time.sleep(0.05)
    assert made == [0, 1]
    assert [next(items), next(items), next(items)] == [1, 2, 3]
    with pytest.raises(ValueError, match="no 4"):
        next(items)
    time.sleep(0.05)
    assert len(made) <= 6, "what nobody asks for is not made"

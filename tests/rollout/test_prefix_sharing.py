"""Sharing a prefix cache must never let timing into the result."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_fleet.rollout.prefix_sharing import BLOCK, AttentionTiles, PrefixSharing

TILES = AttentionTiles(head_dim=32, queries_per_key=2, element_bytes=4, cache_bytes=512 << 10, rows=8)


def kernel_tile(tiles: AttentionTiles, queries: int) -> int:
    """Keys per tile as the kernel computes it for ``queries`` new tokens, written out anew for fp32 on x86."""
    bytes_per_row = tiles.head_dim * (4 + 2 * 4 + 4) + 8 * 4
    heads = min(tiles.cache_bytes // bytes_per_row // 8 * 8, -(-queries * tiles.queries_per_key // 8) * 8)
    return (tiles.cache_bytes - heads * tiles.head_dim * 8) // (8 * 4 + 2 * tiles.head_dim * 4) // 32 * 32


def test_tiles_of_a_model():
    torch = pytest.importorskip("torch")
    heads = SimpleNamespace(num_attention_heads=32, num_key_value_heads=8)
    model = SimpleNamespace(dtype=torch.bfloat16, hf_text_config=heads, get_head_size=lambda: 128)
    tiles = AttentionTiles.of(model)
    assert (tiles.head_dim, tiles.queries_per_key, tiles.element_bytes, tiles.rows) == (128, 4, 2, 32)
    assert tiles.cache_bytes == torch.cpu.get_capabilities()["l2_cache_size"] // 2


@given(st.integers(1, 4000), st.data(), st.sampled_from([32, 64, 128]), st.sampled_from([1, 2, 4, 8]))
def test_what_fits_one_tile_fits_whatever_is_cached(length, data, head_dim, queries_per_key):
    tiles = AttentionTiles(head_dim, queries_per_key, 4, 512 << 10, 8)
    uncached = data.draw(st.integers(1, length))
    if tiles.one_tile(length, uncached):
        for new in {1, uncached // 2 or 1, uncached}:
            assert length <= kernel_tile(tiles, new)


def test_small_contexts_share_and_long_ones_do_not():
    sharing = PrefixSharing(TILES)
    assert [sharing.salt("a", n) for n in (600, 800, 1000)] == [None] * 3
    assert sharing.salt("b", 1500) == "b"
    assert sharing.salt("c", 700) is None and sharing.salt("c", 1600) == "c"


def test_an_episode_on_its_own_stays_so_until_the_cache_is_emptied():
    sharing = PrefixSharing(TILES)
    assert sharing.salt("a", 1500) == "a" and sharing.salt("a", 1501) == "a"
    sharing.forget()
    assert sharing.salt("a", 700) is None


@given(st.lists(st.integers(1, 300), min_size=1, max_size=12))
def test_the_decision_depends_on_the_episode_alone(growth):
    lengths = [sum(growth[: i + 1]) for i in range(len(growth))]
    alone, crowded = PrefixSharing(TILES), PrefixSharing(TILES)
    for i in range(20):
        crowded.salt(f"other{i}", 100 * i + BLOCK)
    assert [alone.salt("a", n) for n in lengths] == [crowded.salt("a", n) for n in lengths]

"""Who may read whose cached prefix, so that equal seeds give bit-equal samples on vLLM's CPU attention.

vLLM's CPU kernel works through the keys in tiles whose size depends on how many queries come at once
(``csrc/cpu/cpu_attn_impl.hpp``, ``calcu_tile_size_with_constant_q``). When all keys fit one tile, a token's result does
not depend on how much of its prompt was cached; with several tiles it does, in the last bits. How much of a prompt
other episodes have already cached is a matter of timing. So an episode shares the cache as long as each of its turns
fits one tile whatever is cached, and from the first turn that does not it has a cache of its own, where what it finds
depends on its own past alone. Small contexts, the common case of small models, always share.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass
from typing import Any

BLOCK = 32
"""Tokens of a cache block; hits are multiples of it."""
_FLOAT = 4


@dataclass(frozen=True, slots=True)
class AttentionTiles:
    """The kernel's tiling for one model on one machine.

    Attributes:
        head_dim: of one head.
        queries_per_key: query heads that share one key head.
        element_bytes: of a cached key or value.
        cache_bytes: the kernel's budget: half of the core's L2 cache.
        rows: query heads that one inner loop holds in registers: 8 for float32 on x86; 32, the most, elsewhere.
    """

    head_dim: int
    queries_per_key: int
    element_bytes: int
    cache_bytes: int
    rows: int

    @classmethod
    def of(cls, model: Any) -> AttentionTiles:
        """Args: ``model``: vLLM's ModelConfig."""
        import torch

        float32, text = model.dtype == torch.float32, model.hf_text_config
        return cls(
            head_dim=model.get_head_size(),
            queries_per_key=text.num_attention_heads // text.num_key_value_heads,
            element_bytes=model.dtype.itemsize,
            cache_bytes=torch.cpu.get_capabilities()["l2_cache_size"] // 2,
            rows=8 if float32 and platform.machine() == "x86_64" else 32,
        )

    def one_tile(self, length: int, uncached: int) -> bool:
        """Whether ``length`` keys fit one tile when the last ``uncached`` tokens, or fewer, are queries."""
        work = 2 * _FLOAT * self.head_dim  # a query and its output
        keys = 2 * self.element_bytes * self.head_dim
        logits = _FLOAT * self.rows
        most_queries = self.cache_bytes // (work + keys + logits)
        queries = min(most_queries, uncached * self.queries_per_key + self.rows)
        tile = (self.cache_bytes - queries * work) // (keys + logits) // BLOCK * BLOCK
        return length <= tile


class PrefixSharing:
    """Gives each turn the salt of its cache: ``None`` for the shared one."""

    def __init__(self, tiles: AttentionTiles) -> None:
        self._tiles = tiles
        self._lengths: dict[str, int] = {}
        self._private: set[str] = set()

    def salt(self, session: str, length: int) -> str | None:
        """Args: ``session``: the episode. ``length``: tokens of this prompt, which begins with the one before."""
        if session not in self._private:
            cached = self._lengths.get(session, 0) // BLOCK * BLOCK
            if not self._tiles.one_tile(length, length - cached):
                self._private.add(session)
        self._lengths[session] = length
        return session if session in self._private else None

    def forget(self) -> None:
        """The cache was emptied."""
        self._lengths.clear()
        self._private.clear()

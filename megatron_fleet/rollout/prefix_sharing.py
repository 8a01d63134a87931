"""Sharing of cached prefixes between episodes, such that equal seeds give bit-equal samples with vLLM's CPU attention.

vLLM's CPU kernel processes the keys in tiles whose size depends on the number of queries in the call
(``csrc/cpu/cpu_attn_impl.hpp``, ``calcu_tile_size_with_constant_q``). When all keys fit one tile, a token's result does
not depend on how much of its prompt was cached; with several tiles it does, in the last bits. The amount that other
episodes have already cached depends on timing. So an episode shares the cache as long as each of its turns fits one
tile whatever is cached. From the first turn that does not, it has a private cache, whose hits depend only on its own
history. Small contexts, the common case with small models, are always shared.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass
from typing import Any

BLOCK = 32
"""Tokens per cache block; cache hits are multiples of it."""
_FLOAT = 4


@dataclass(frozen=True, slots=True)
class AttentionTiles:
    """Tiling of the kernel for one model on one machine.

    Attributes:
        head_dim: size of one head.
        queries_per_key: query heads that share one key head.
        element_bytes: bytes of an element of a cached key or value.
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
        """Return whether ``length`` keys fit one tile when the last ``uncached`` tokens, or fewer, are queries."""
        work = 2 * _FLOAT * self.head_dim  # a query and its output
        keys = 2 * self.element_bytes * self.head_dim
        logits = _FLOAT * self.rows
        most_queries = self.cache_bytes // (work + keys + logits)
        queries = min(most_queries, uncached * self.queries_per_key + self.rows)
        tile = (self.cache_bytes - queries * work) // (keys + logits) // BLOCK * BLOCK
        return length <= tile


class PrefixSharing:
    """Choice of the cache salt for each turn; ``None``: the shared cache."""

    def __init__(self, tiles: AttentionTiles) -> None:
        self._tiles = tiles
        self._lengths: dict[str, int] = {}
        self._private: set[str] = set()

    def salt(self, session: str, length: int) -> str | None:
        """Return the salt of a turn.

        Args:
            session: the episode.
            length: tokens of the turn's prompt, which has the previous turn's prompt as a prefix.
        """
        if session not in self._private:
            cached = self._lengths.get(session, 0) // BLOCK * BLOCK
            if not self._tiles.one_tile(length, length - cached):
                self._private.add(session)
        self._lengths[session] = length
        return session if session in self._private else None

    def forget(self) -> None:
        """Reset, because the cache was emptied."""
        self._lengths.clear()
        self._private.clear()

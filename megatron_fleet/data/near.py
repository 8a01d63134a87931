"""Near-duplicates: tasks of one environment with the same seed data whose prompts are nearly identical.

MinHash with banding (Broder, "On the resemblance and containment of documents", 1997; Leskovec, Rajaraman and Ullman,
"Mining of Massive Datasets", §3.3-3.4): texts become sets of word triples, 120 hash minima estimate the overlap of two
sets, and texts that agree in one of 20 bands of 6 minima are compared exactly. A pair at the threshold is found with
probability 1 − (1 − 0.8⁶)²⁰ = 0.998.
"""

from __future__ import annotations

import re
import zlib
from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np

from megatron_fleet.data.task import Task

THRESHOLD = 0.8
"""Minimum Jaccard similarity: shared triples over all triples of two texts."""
WORDS = 3
BANDS, BAND = 20, 6
FACTORS = np.random.default_rng(1).integers(0, 2**63, BANDS * BAND, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
OFFSETS = np.random.default_rng(2).integers(0, 2**63, BANDS * BAND, dtype=np.uint64)


def near_duplicates(tasks: Iterable[Task]) -> list[list[Task]]:
    """Return groups of two or more tasks, the largest first; chains of similar texts are one group.

    Tasks are compared only within one environment and seed data: the same words about other data are another task.
    """
    worlds: defaultdict[tuple[str, str | None, str | None], list[Task]] = defaultdict(list)
    for task in tasks:
        worlds[task.env_key, task.data_key, task.data_version].append(task)
    groups = [[of_one[i] for i in group] for of_one in worlds.values() for group in similar([t.prompt for t in of_one])]
    return sorted(groups, key=lambda group: (-len(group), group[0].key))


def similar(texts: Sequence[str]) -> list[list[int]]:
    """Return groups of indices of similar texts, see ``near_duplicates``. Only the words of a text are compared."""
    places: defaultdict[tuple[str, ...], list[int]] = defaultdict(list)
    for place, text in enumerate(texts):
        places[words(text)].append(place)
    same = list(places.values())
    sets = [triples(key) for key in places]
    parent = _join(sets)
    groups: defaultdict[int, list[int]] = defaultdict(list)
    for index, of_text in enumerate(same):
        groups[_root(parent, index)] += of_text
    return [sorted(group) for group in groups.values() if len(group) > 1]


def words(text: str) -> tuple[str, ...]:
    """Split a text into case-folded words and numbers."""
    return tuple(re.findall(r"\w+", text.casefold()))


def triples(of: Sequence[str]) -> frozenset[int]:
    """Return 64-bit hashes of all runs of ``WORDS`` consecutive words; a shorter text is zero-padded."""
    hashes = [zlib.crc32(word.encode()) for word in of]
    hashes += [0] * (WORDS - len(hashes))
    one = np.array(hashes, np.uint64)
    rows = np.lib.stride_tricks.sliding_window_view(one, WORDS)
    return frozenset((rows * FACTORS[:WORDS]).sum(axis=1, dtype=np.uint64).tolist())


def jaccard(a: frozenset[int], b: frozenset[int]) -> float:
    """Return |a ∩ b| / |a ∪ b| of two non-empty sets."""
    both = len(a & b)
    return both / (len(a) + len(b) - both)


def _join(sets: Sequence[frozenset[int]]) -> list[int]:
    """Return a union-find forest over the sets, as the parent of each: sets in one tree are similar."""
    parent = list(range(len(sets)))
    minima = np.stack([_minima(of_text) for of_text in sets]) if sets else np.zeros((0, BANDS * BAND), np.uint32)
    for band in range(BANDS):
        buckets: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
        for index, values in enumerate(minima[:, band * BAND : (band + 1) * BAND].tolist()):
            buckets[tuple(values)].append(index)
        for bucket in buckets.values():
            if len(bucket) > 1:
                _join_bucket(bucket, sets, parent)
    return parent


def _join_bucket(bucket: Sequence[int], sets: Sequence[frozenset[int]], parent: list[int]) -> None:
    """Compare each set with one per tree found in the bucket so far, so that many copies of one text are cheap."""
    seen: dict[int, int] = {}
    for index in bucket:
        root = _root(parent, index)
        if root in seen:
            continue
        alike = next((r for r, other in seen.items() if jaccard(sets[index], sets[other]) >= THRESHOLD), None)
        if alike is None:
            seen[root] = index
        else:
            parent[root] = alike


def _root(parent: list[int], index: int) -> int:
    while parent[index] != index:
        parent[index] = parent[parent[index]]
        index = parent[index]
    return index


def _minima(values: frozenset[int]) -> np.ndarray:
    """Return uint32 ``[BANDS · BAND]``: the set's minimum under each of that many hash functions (multiply-shift)."""
    hashes = np.fromiter(values, np.uint64, len(values))
    return ((hashes[:, None] * FACTORS + OFFSETS) >> np.uint64(32)).min(axis=0).astype(np.uint32)

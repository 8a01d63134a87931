"""Parts of a micro-batch on context-parallel ranks."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("megatron_fleet.platform.megatron")

from megatron_fleet.platform.megatron.attention import local_parts, local_tokens


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_each_token_has_one_rank_and_each_rank_as_much_to_attend_to(ranks):
    lengths = [2 * ranks * n for n in (5, 1, 8)]
    shares = [local_tokens(lengths, ranks, rank) for rank in range(ranks)]
    assert sorted(np.concatenate(shares)) == list(range(sum(lengths)))
    assert {len(share) for share in shares} == {sum(lengths) // ranks}
    attended = [
        sum(place - start + 1 for start, first, end in local_parts(lengths, ranks, rank) for place in range(first, end))
        for rank in range(ranks)
    ]
    assert max(attended) == min(attended)


def test_two_ranks_and_two_sequences():
    assert local_tokens([8, 4], 2, 0).tolist() == [0, 1, 6, 7, 8, 11]
    assert local_tokens([8, 4], 2, 1).tolist() == [2, 3, 4, 5, 9, 10]
    assert local_tokens([], 2, 1).tolist() == []


def test_a_length_that_cannot_be_cut():
    with pytest.raises(ValueError, match="6 tokens cannot be cut into 4"):
        local_tokens([8, 6], 2, 0)

"""Random parameters that depend only on the seed and the parameter, so they are equal in every layout."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
from megatron.core.transformer.module import MegatronModule


def parameter_shards(model_chunks: Sequence[MegatronModule]) -> Iterator[ShardedTensor]:
    """This rank's parameters with their place in the whole model (key, global shape, global offset)."""
    metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    for chunk in model_chunks:
        state = chunk.sharded_state_dict(metadata=metadata)
        apply_factories(state)
        for value in nested_values(state):
            if isinstance(value, ShardedTensor) and value.data is not None:
                yield value


@torch.no_grad()
def fill_random(model_chunks: Sequence[MegatronModule], std: float, seed: int, vocab_size: int) -> None:
    """Fill matrices with Normal(0, std), norms with a gain of one, vocabulary padding and expert biases with zero."""
    gain = 0.0 if model_chunks[0].config.layernorm_zero_centered_gamma else 1.0
    for shard in parameter_shards(model_chunks):
        shape = list(shard.global_shape)
        if "norm" in shard.key:
            shard.data.fill_(gain)
            continue
        if shard.key.endswith("expert_bias"):
            shard.data.zero_()
            continue
        padded = "word_embeddings" in shard.key or "output_layer" in shard.key
        if padded:
            shape[0] = vocab_size
        digest = hashlib.sha256(f"{seed} {shard.key}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        whole = torch.randn(shape, generator=generator) * std
        if padded and shard.global_shape[0] > vocab_size:
            whole = torch.cat([whole, whole.new_zeros(shard.global_shape[0] - vocab_size, *shape[1:])])
        sizes = [1] * shard.prepend_axis_num + list(shard.local_shape)
        place = tuple(slice(o, o + n) for o, n in zip(shard.global_offset, sizes, strict=True))
        shard.data.copy_(whole[place].reshape(shard.data.shape))

"""Tensors of a packed micro-batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from megatron_fleet.algorithms.datum import Datum
from megatron_fleet.trainer.packing.pack_plan import round_up


def micro_batch_width(lengths: Sequence[int], sequence_align: int = 1, micro_batch_align: int = 1) -> int:
    """Tokens of a padded micro-batch of sequences of these lengths; an empty one has ``micro_batch_align``."""
    return round_up(max(1, sum(round_up(length, sequence_align) for length in lengths)), micro_batch_align)


@dataclass(slots=True)
class PackedMicroBatch:
    """One micro-batch of ``P`` tokens. Index ``i`` predicts token ``i + 1`` of its sequence.

    Invariants: ``sum(lengths) + filler == P``; ``sequence`` never decreases; ``real`` is true at ``real_tokens``
    places, among them every place of ``trained`` and its successor.

    Attributes:
        tokens: int64 ``[P]``; 0 where nothing is real.
        positions: int64 ``[P]``, position of each token in its sequence; continues through its alignment padding,
            restarts in the filler.
        real: bool ``[P]``: a token of a sequence, neither alignment nor filler.
        lengths: tokens of each sequence, alignment included; a sequence without tokens has no entry.
        filler: tokens after them.
        trained: int64 ``[A]``, indices into the micro-batch that predict a trained token.
        targets: int64 ``[A]``, the tokens they predict.
        sequence: int64 ``[A]``, index of the sequence they belong to.
        loss_scale, scaled_advantages, behaviour: float32 ``[A]``, the `Datum` fields of these tokens.
        arrays: float32 ``[A]`` each, `Datum.arrays` of these tokens.
        real_tokens: tokens that belong to sequences.
        extras: tokens of a sequence in the micro-batch and its `Datum.extras`, for those that have any.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    real: torch.Tensor
    lengths: tuple[int, ...]
    filler: int
    trained: torch.Tensor
    targets: torch.Tensor
    sequence: torch.Tensor
    loss_scale: torch.Tensor
    scaled_advantages: torch.Tensor
    behaviour: torch.Tensor
    arrays: Mapping[str, torch.Tensor]
    real_tokens: int
    extras: tuple[tuple[slice, Mapping[str, Any]], ...]


def pack_micro_batch(micro_batch: Sequence[Datum], width: int, sequence_align: int = 1) -> PackedMicroBatch:
    """Concatenate the sequences of a micro-batch and collect their trained positions, in order.

    Args:
        width: tokens of the micro-batch, `micro_batch_width` of its sequences or more.
        sequence_align: each sequence is padded to a multiple of this many tokens.

    Raises:
        ValueError: the sequences do not fit, a first token is trained, or their ``arrays`` have different names.
    """
    tokens, positions, real = np.zeros(width, np.int64), np.zeros(width, np.int64), np.zeros(width, np.bool_)
    trained, lengths, extras, start = [], [], [], 0
    for datum in micro_batch:
        n, taken = len(datum), round_up(len(datum), sequence_align)
        if start + taken > width:
            raise ValueError(f"a micro-batch of {width} tokens cannot hold {[len(d) for d in micro_batch]}")
        if n and datum.loss_mask[0]:
            raise ValueError("the first token of a sequence has no prediction and cannot be trained")
        tokens[start : start + n] = datum.token_ids
        positions[start : start + taken] = np.arange(taken)
        real[start : start + n] = True
        trained.append(start + np.flatnonzero(datum.loss_mask) - 1)
        if datum.extras:
            extras.append((slice(start, start + n), datum.extras))
        if taken:
            lengths.append(taken)
        start += taken
    positions[start:] = np.arange(width - start)
    index = np.concatenate(trained) if trained else np.zeros(0, np.int64)
    return PackedMicroBatch(
        tokens=torch.from_numpy(tokens),
        positions=torch.from_numpy(positions),
        real=torch.from_numpy(real),
        lengths=tuple(lengths),
        filler=width - start,
        trained=torch.from_numpy(index),
        targets=torch.from_numpy(tokens[index + 1]),
        sequence=torch.from_numpy(np.repeat(np.arange(len(micro_batch)), [len(places) for places in trained])),
        loss_scale=_at_trained(micro_batch, [np.full(len(d), d.loss_scale) for d in micro_batch]),
        scaled_advantages=_at_trained(micro_batch, [d.scaled_advantages for d in micro_batch]),
        behaviour=_at_trained(micro_batch, [d.behaviour_logprobs for d in micro_batch]),
        arrays={name: _at_trained(micro_batch, [d.arrays[name] for d in micro_batch]) for name in _names(micro_batch)},
        real_tokens=sum(len(d) for d in micro_batch),
        extras=tuple(extras),
    )


def unpack_trained(micro_batch: Sequence[Datum], values: np.ndarray) -> list[np.ndarray]:
    """Scatter values ``[A]`` at a micro-batch's trained positions to float32 ``[T]`` per sequence, 0 elsewhere."""
    out, start = [], 0
    for datum in micro_batch:
        where = np.flatnonzero(datum.loss_mask)
        full = np.zeros(len(datum), np.float32)
        full[where] = values[start : start + len(where)]
        out.append(full)
        start += len(where)
    return out


def _at_trained(micro_batch: Sequence[Datum], fields: Sequence[np.ndarray]) -> torch.Tensor:
    picked = [f[d.loss_mask] for d, f in zip(micro_batch, fields, strict=True)]
    joined = np.concatenate(picked) if picked else np.zeros(0)
    return torch.from_numpy(joined.astype(np.float32))


def _names(micro_batch: Sequence[Datum]) -> Iterator[str]:
    """Names of the arrays, which all sequences have."""
    for name, sequences in Counter(name for datum in micro_batch for name in datum.arrays).items():
        if sequences < len(micro_batch):
            raise ValueError(f"only {sequences} of {len(micro_batch)} sequences have an array {name}")
        yield name

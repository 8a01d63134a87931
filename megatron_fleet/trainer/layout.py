"""Sizes derived from a layout. Pure functions; ``policy.validate`` checks which layouts are allowed."""

from __future__ import annotations

from megatron_fleet.config.errors import UserError
from megatron_fleet.config.schema import ParallelConfig, PrecisionConfig
from megatron_fleet.trainer.precision import token_alignment


def padded_vocab_size(vocab_size: int, tensor: int) -> int:
    """Vocabulary rows of the embedding and output weight over all tensor ranks: a multiple of ``tensor``."""
    return -(-vocab_size // tensor) * tensor


def sequence_alignment(parallel: ParallelConfig) -> int:
    """Multiple of tokens that each sequence of a micro-batch is padded to: context parallelism cuts it into 2 × context
    parts, and each rank gets one from the front and its mirror image from the back.
    """
    return 2 * parallel.context if parallel.context > 1 else 1


def micro_batch_alignment(parallel: ParallelConfig, precision: PrecisionConfig) -> int:
    """Multiple of tokens that a micro-batch is padded to: each context rank's part is cut again into ``tensor`` slices,
    and each slice must suit the precision.
    """
    slices = parallel.tensor if parallel.sequence_parallel else 1
    return token_alignment(precision) * slices * sequence_alignment(parallel)


def check_micro_batch_tokens(micro_batch_tokens: int, parallel: ParallelConfig, precision: PrecisionConfig) -> None:
    """Refuse a capacity that cannot be the width of a micro-batch.

    Raises:
        UserError: ``micro_batch_tokens`` is not a multiple of `micro_batch_alignment`.
    """
    if micro_batch_tokens % (align := micro_batch_alignment(parallel, precision)):
        raise UserError(
            f"policy.micro_batch_tokens={micro_batch_tokens} is not a multiple of {align}, as the parallel "
            f"layout and the precision need; raise it to {-(-micro_batch_tokens // align) * align}."
        )


def layers_of_stages(layers: int, parallel: ParallelConfig) -> list[int]:
    """Transformer layers of each pipeline rank, over all its virtual stages.

    Raises:
        UserError: the layers cannot be split as ``parallel`` specifies.
    """
    p = parallel
    ends = {"first_stage_layers": p.first_stage_layers, "last_stage_layers": p.last_stage_layers}
    given = [n for n in ends.values() if n is not None]
    between, rest = p.pipeline - len(given), layers - sum(given)
    if given and p.pipeline == 1:
        raise UserError(
            f"parallel.{next(k for k, v in ends.items() if v)} has no effect with parallel.pipeline=1; remove it."
        )
    if (between == 0 and rest) or (between and (rest < between or rest % between)):
        fitting = ", ".join(str(n) for n in range(1, layers + 1) if layers % n == 0)
        raise UserError(
            f"parallel.pipeline={p.pipeline} with first_stage_layers={p.first_stage_layers} and last_stage_layers="
            f"{p.last_stage_layers} leaves {rest} of num_hidden_layers={layers} of the model's config.json for "
            f"{between} ranks; choose sizes that share them evenly (without uneven ends: parallel.pipeline one of "
            f"{fitting})."
        )
    stages = [rest // between if between else 0] * p.pipeline
    stages[0] = p.first_stage_layers or stages[0]
    stages[-1] = p.last_stage_layers or stages[-1]
    for count in stages:
        if count % p.virtual:
            raise UserError(
                f"parallel.virtual={p.virtual} does not divide the {count} layers of a pipeline rank; choose a divisor."
            )
    return stages

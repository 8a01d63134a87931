"""A weight table compiled for one model: Megatron parameters ↔ contiguous rows of HF tensors.

For every family at hand a row of a Megatron parameter *is* a row (or, where tensor parallelism splits the input axis,
a part of a row) of one HF tensor. So everything that moves weights is a loop over ``Piece``s. No torch, no Megatron.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_fleet.config.errors import UserError
from megatron_fleet.weights.architectures import ARCHITECTURES
from megatron_fleet.weights.rules import Leaf, Rule

Span = tuple[int, int]
"""Half-open interval of indices."""


@dataclass(frozen=True, slots=True)
class Piece:
    """``parameter[rows] == tensor[tensor_rows, tensor_cols]``.

    Attributes:
        rows: rows of the rank's local parameter.
        tensor: HF tensor; ``None`` = these rows are vocabulary padding and hold zeros.
        tensor_rows: as many rows as ``rows``.
        tensor_cols: columns of the HF tensor, all columns of the local parameter; ``None`` = all of them (also 1-d).
    """

    rows: Span
    tensor: str | None
    tensor_rows: Span
    tensor_cols: Span | None = None


def cut(size: int, parts: int, index: int, what: str) -> Span:
    """Part ``index`` of ``size`` rows split evenly. Raises UserError when it does not divide."""
    if size % parts:
        raise UserError(f"parallel.tensor={parts} does not divide {what} ({size}); choose a divisor.")
    n = size // parts
    return index * n, (index + 1) * n


class WeightTable:
    """The table of one model.

    Attributes:
        tensors: shape of every HF tensor of the model, in checkpoint order (embedding, layers, final norm, head).
        layers: number of transformer layers.
        tied: the head is the word embedding.
    """

    def __init__(self, hf_config: Mapping[str, Any]) -> None:
        """Compile for a raw ``config.json``. Raises UserError for an unknown family, variant or a missing key."""
        model_type = hf_config.get("model_type")
        if model_type not in ARCHITECTURES:
            known = ", ".join(sorted(ARCHITECTURES))
            raise UserError(f"config.json: model_type is {model_type!r}; supported: {known}.")
        self._arch = ARCHITECTURES[model_type]
        try:
            self._dims = self._arch.dims(hf_config)
        except KeyError as e:
            raise UserError(f"config.json: {e.args[0]} is missing; it is needed for model_type={model_type}.") from None
        self.layers = self._dims["layers"]
        self.tied = bool(hf_config.get("tie_word_embeddings", False))
        self._rules = {name: rule for rule in self._all_rules() for name in rule.names}
        self.tensors = self._tensors()
        inert = [*self._arch.inert, *(re.escape(leaf.name) for leaf in self._leaves() if self._stand_in(leaf))]
        self._inert = re.compile("|".join(f"(?:{p})" for p in inert) or r"(?!)")

    def is_inert(self, tensor: str) -> bool:
        """Whether an HF tensor may be in the files without being a weight of the model."""
        return self._inert.fullmatch(tensor) is not None

    def is_vocabulary(self, parameter: str) -> bool:
        """Whether the rows of a Megatron parameter are the vocabulary (and may be padded)."""
        return self._find(parameter)[0].layout == "vocab"

    def parameters(self, layers: Iterable[int], first: bool, last: bool, spec: int = 0) -> list[str]:
        """Names of the parameters of a pipeline stage, layers by their global index.

        ``first`` and ``last`` say whether the stage holds the embedding and the head; ``spec`` 0 is Megatron's local
        layer spec, 1 is Transformer Engine's.
        """
        rules = list(self._arch.before) if first else []
        names = [r.names[0] for r in rules]
        for i in layers:
            names += [r.names[min(spec, len(r.names) - 1)].format(i=i) for r in self._arch.layer]
        for rule in self._arch.after if last else ():
            # A stage with both ends uses the embedding itself as its tied head: there is no second parameter.
            if not (first and any(self._stand_in(leaf) for leaf in rule.leaves)):
                names.append(rule.names[0])
        return names

    def local_shape(self, parameter: str, tp_size: int, padded_vocab: int | None = None) -> tuple[int, ...]:
        """Shape of a parameter (global layer index in its name) on each tensor-parallel rank."""
        rule, _ = self._find(parameter)
        shape = list(self._shape(rule.leaves[0]))
        shape[0] = sum(self._shape(leaf)[0] for leaf in rule.leaves)
        if rule.layout == "vocab":
            shape[0] = padded_vocab or shape[0]
        if rule.shard is not None:
            start, end = cut(shape[rule.shard], tp_size, 0, f"axis {rule.shard} of {parameter}")
            shape[rule.shard] = end - start
        return tuple(shape)

    def pieces(self, parameter: str, tp_rank: int, tp_size: int, padded_vocab: int | None = None) -> tuple[Piece, ...]:
        """What the local rows of a parameter are.

        Args:
            parameter: Megatron name with the *global* layer index.
            padded_vocab: rows of the embedding over all tensor-parallel ranks; ``None`` = the vocabulary as it is.

        Raises:
            UserError: the parameter is not in the table, or the layout does not divide it.
        """
        rule, layer = self._find(parameter)
        leaves = [(self._name(leaf, layer), self._shape(leaf)) for leaf in rule.leaves]
        if rule.layout == "qkv":
            return self._qkv(leaves, tp_rank, tp_size)
        if rule.layout == "vocab":
            return self._vocab(leaves[0], tp_rank, tp_size, padded_vocab)
        out: list[Piece] = []
        row = 0
        for name, shape in leaves:
            rows, cols = (0, shape[0]), None
            if rule.shard == 0:
                rows = cut(shape[0], tp_size, tp_rank, f"the rows of {name}")
            elif rule.shard == 1:
                cols = cut(shape[1], tp_size, tp_rank, f"the columns of {name}")
            end = row + rows[1] - rows[0]
            out.append(Piece((row, end), name, rows, cols))
            row = end
        return tuple(out)

    def _qkv(self, leaves: list[tuple[str, tuple[int, ...]]], tp_rank: int, tp_size: int) -> tuple[Piece, ...]:
        groups = self._dims["groups"]
        first, end = cut(groups, tp_size, tp_rank, "num_key_value_heads")
        out: list[Piece] = []
        row = 0
        for group in range(first, end):
            for name, shape in leaves:
                n = shape[0] // groups
                out.append(Piece((row, row + n), name, (group * n, (group + 1) * n)))
                row += n
        return tuple(out)

    def _vocab(
        self, leaf: tuple[str, tuple[int, ...]], tp_rank: int, tp_size: int, padded_vocab: int | None
    ) -> tuple[Piece, ...]:
        name, (vocab, *_) = leaf
        start, end = cut(padded_vocab or vocab, tp_size, tp_rank, "the padded vocabulary")
        real = max(start, min(end, vocab))
        out = []
        if real > start:
            out.append(Piece((0, real - start), name, (start, real)))
        if end > real:
            out.append(Piece((real - start, end - start), None, (0, end - real)))
        return tuple(out)

    def _find(self, parameter: str) -> tuple[Rule, int | None]:
        match = re.search(r"\.layers\.(\d+)\.", parameter)
        layer = int(match[1]) if match else None
        key = parameter if match is None else parameter[: match.start(1)] + "{i}" + parameter[match.end(1) :]
        if key not in self._rules or (layer is not None and layer >= self.layers):
            raise UserError(f"Megatron parameter {parameter} has no HF counterpart in the weight table of this model.")
        return self._rules[key], layer

    def _all_rules(self) -> tuple[Rule, ...]:
        return (*self._arch.before, *self._arch.layer, *self._arch.after)

    def _leaves(self) -> list[Leaf]:
        return [leaf for rule in self._all_rules() for leaf in rule.leaves]

    def _stand_in(self, leaf: Leaf) -> str | None:
        return leaf.tied if self.tied else None

    def _name(self, leaf: Leaf, layer: int | None) -> str:
        return self._stand_in(leaf) or leaf.name.format(i=layer)

    def _shape(self, leaf: Leaf) -> tuple[int, ...]:
        return tuple(self._dims[d] for d in leaf.shape)

    def _tensors(self) -> dict[str, tuple[int, ...]]:
        stages: list[tuple[tuple[Rule, ...], Iterable[int | None]]] = [
            (self._arch.before, (None,)),
            (self._arch.layer, range(self.layers)),
            (self._arch.after, (None,)),
        ]
        return {
            leaf.name.format(i=layer): self._shape(leaf)
            for rules, layers in stages
            for layer in layers
            for rule in rules
            for leaf in rule.leaves
            if not self._stand_in(leaf)
        }


def prove_coverage(table: WeightTable, tp_size: int, padded_vocab: int | None = None) -> None:
    """Check both ways that the table loses and repeats nothing under ``tp_size``.

    Every row of every local parameter is in exactly one piece. Every element of every HF tensor is held by exactly one
    tensor-parallel rank, or whole by all of them. Raises ValueError naming the first violation.
    """
    held: dict[str, list[tuple[Span, Span | None]]] = {name: [] for name in table.tensors}
    for parameter in table.parameters(range(table.layers), first=True, last=True):
        shape = table.local_shape(parameter, tp_size, padded_vocab)
        for rank in range(tp_size):
            row = 0
            for piece in table.pieces(parameter, rank, tp_size, padded_vocab):
                if piece.rows[0] != row or piece.rows[1] - row != piece.tensor_rows[1] - piece.tensor_rows[0]:
                    raise ValueError(f"{parameter} on rank {rank}: row {row} is not covered once")
                row = piece.rows[1]
                if piece.tensor is not None:
                    held[piece.tensor].append((piece.tensor_rows, piece.tensor_cols))
            if row != shape[0]:
                raise ValueError(f"{parameter} on rank {rank}: {row} of {shape[0]} rows are covered")
    for name, boxes in held.items():
        check_tiling(name, table.tensors[name], boxes)


def check_tiling(tensor: str, shape: tuple[int, ...], boxes: Iterable[tuple[Span, Span | None]]) -> None:
    """Raise ValueError unless the distinct boxes (rows, columns) cover a tensor completely without overlap."""
    distinct = sorted(set(boxes), key=lambda box: (box[0], box[1] or (0, 0)))
    width = shape[1] if len(shape) == 2 else 1
    area = 0
    for k, (rows, cols) in enumerate(distinct):
        area += (rows[1] - rows[0]) * (width if cols is None else cols[1] - cols[0])
        for other_rows, other_cols in distinct[k + 1 :]:
            if other_rows[0] >= rows[1]:
                break
            if cols is None or other_cols is None or (cols[0] < other_cols[1] and other_cols[0] < cols[1]):
                raise ValueError(f"{tensor}: rows {rows} and {other_rows} overlap")
    if area != shape[0] * width:
        raise ValueError(f"{tensor}: {area} of {shape[0] * width} elements are covered")

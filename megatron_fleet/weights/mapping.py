"""A weight table compiled for one model: Megatron tensors ↔ contiguous rows of HF tensors.

In every supported family a row of a Megatron tensor *is* a row of one HF tensor: nothing is transposed, permuted or
computed (norms that only Megatron centres at zero differ by 1). So all code that moves weights (loading, conversion,
export, checks) is a loop over ``Piece``s. The table is independent of the parallel layout: it gives the source of rows
of the *whole* tensor. No torch, no Megatron.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from megatron_fleet.config.errors import UserError
from megatron_fleet.models import table
from megatron_fleet.models.hf_config import architecture_of, read_model
from megatron_fleet.models.model import Model
from megatron_fleet.models.rules import Leaf, Rows, Rule

Interval = tuple[int, int]
"""Half-open interval of indices."""


@dataclass(frozen=True, slots=True)
class Piece:
    """``matrix[rows] == tensor[tensor_rows]``; both spans have the same length.

    ``tensor=None`` means zero-filled rows: padding of the vocabulary.
    """

    rows: Interval
    tensor: str | None
    tensor_rows: Interval


@dataclass(frozen=True, slots=True)
class Matrix:
    """The part of a Megatron tensor that belongs to one layer and one expert: 1-d or 2-d.

    Attributes:
        key: checkpoint key that contains the layer's number (see `split_key`).
        expert: index of the expert in a tensor that stacks experts; otherwise ``None``.
        shape: shape without padding.
        pieces: sources of its rows, in order.
        rule: rule that produced it.
        aliases: other keys for the same content.
    """

    key: str
    expert: int | None
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    rule: Rule
    aliases: tuple[str, ...] = ()

    def restrict(self, rows: Interval) -> tuple[Piece, ...]:
        """Pieces of a row range, with rows relative to its start; rows after the last one are padding.

        Raises UserError for padding of a tensor that has none.
        """
        out = []
        for piece in self.pieces:
            a, b = max(rows[0], piece.rows[0]), min(rows[1], piece.rows[1])
            if a < b:
                start = piece.tensor_rows[0] + a - piece.rows[0]
                out.append(Piece((a - rows[0], b - rows[0]), piece.tensor, (start, start + b - a)))
        padding = max(rows[0], self.shape[0])
        if padding < rows[1]:
            if not self.rule.vocabulary:
                raise UserError(
                    f"Megatron tensor {self.key} has rows up to {rows[1]}; config.json asks for {self.shape[0]}."
                )
            out.append(Piece((padding - rows[0], rows[1] - rows[0]), None, (0, rows[1] - padding)))
        return tuple(out)


def split_key(key: str, lead: tuple[int, ...]) -> tuple[str, int | None]:
    """Convert the key and leading indices of a checkpoint entry to a key with the layer's number, and the expert.

    Megatron stacks layers of one kind into a tensor ``decoder.layers.…`` with the layer as its first index, and numbers
    them, ``decoder.layers.3.…``, otherwise. Experts are always stacked.
    """
    stacked = re.match(r"(.*\blayers)\.(?!\d)(.*)", key)
    if stacked and lead:
        key, lead = f"{stacked[1]}.{lead[0]}.{stacked[2]}", lead[1:]
    return key, (lead[0] if lead else None)


def stack_key(key: str) -> tuple[str, int | None]:
    """``decoder.layers.3.x`` → ``decoder.layers.x`` and 3, the form in which layers of one kind are stacked."""
    match = re.match(r"decoder\.layers\.([0-9]{1,9})\.(.*)", key)
    return (f"decoder.layers.{match[2]}", int(match[1])) if match else (key, None)


@dataclass(frozen=True, slots=True)
class StackedRows:
    """Rows of a tensor that stacks experts, seen as a matrix: all but its last axis flattened.

    Attributes:
        tensor, shape: name and shape of the stacking tensor.
    """

    tensor: str
    shape: tuple[int, ...]
    rows: Interval


class WeightTable:
    """The weight table of one model.

    Attributes:
        model: the model's architecture.
        tensors: shape of every HF tensor of the model, in checkpoint order (embedding, layers, final norm, head).
        repeated: HF tensors of MTP layers that are copies → the original tensor.
        stacked: HF tensors of one expert → where releases that stack all experts store it.
        offsets: HF tensors whose values differ in Megatron → Megatron's value minus HF's.
    """

    def __init__(self, hf_config: Mapping[str, Any], *, prediction: bool = True) -> None:
        """Compile the table for a raw ``config.json``.

        Args:
            prediction: whether the multi-token prediction layers in the config belong to the model; many checkpoints
                are published without them.

        Raises:
            UserError: see `hf_config.read_model`.
        """
        model = read_model(hf_config)
        self.model = model if prediction else replace(model, mtp=0)
        self._architecture = architecture_of(hf_config)
        self._sizes = sizes(self.model)
        kinds = {(self.model.has_mixer(i), self.model.has_experts(i)) for i in range(self.model.layers)}
        self._layer_rules = {kind: table.layer(self.model, *kind) for kind in kinds}
        self._prediction_rules = table.prediction(self.model, self._architecture.prediction)
        originals = {"embedding": table.EMBEDDING, "head": self._architecture.head}
        self.repeated = {
            self._name(name, i): self._name(originals[of], None)
            for i in range(self.model.layers, self.model.layers + self.model.mtp)
            for name, of in self._architecture.prediction.repeated.items()
        }
        if self.model.tied:
            head, embedding = self._architecture.head, self._name(table.EMBEDDING, None)
            self.repeated = {name: embedding if of == head else of for name, of in self.repeated.items()}
            self.repeated[head] = embedding

    @cached_property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """See the class."""
        return {
            self._name(leaf.name, i, e): self._shape(leaf)
            for rule, i, e in self._entries()
            for leaf in rule.leaves
            if not self._stand_in(leaf)
        }

    @cached_property
    def stacked(self) -> dict[str, StackedRows]:
        """See the class."""
        out = {}
        for rule, i, e in self._entries():
            for leaf in rule.leaves:
                if leaf.stack is not None and e is not None:
                    rows, *rest = self._shape(leaf)
                    shape = (self.model.experts, leaf.stack.parts * rows, *rest)
                    first = (e * leaf.stack.parts + leaf.stack.part) * rows
                    where = StackedRows(self._name(leaf.stack.name, i), shape, (first, first + rows))
                    out[self._name(leaf.name, i, e)] = where
        return out

    @cached_property
    def offsets(self) -> dict[str, float]:
        """See the class."""
        return {
            self._name(leaf.name, i, e): rule.offset
            for rule, i, e in self._entries()
            if rule.offset
            for leaf in rule.leaves
        }

    @cached_property
    def _passthrough(self) -> re.Pattern[str]:
        body = re.escape(self._architecture.body)
        patterns = [pattern.replace("{body}", body) for pattern in self._architecture.passthrough]
        if not self.model.mtp and any(field.to == "mtp" for field in self._architecture.fields):
            patterns.append(self._prediction_pattern)
        return re.compile("|".join(f"(?:{p})" for p in patterns))

    @property
    def _prediction_pattern(self) -> str:
        if self._architecture.prediction.pattern is not None:
            return self._architecture.prediction.pattern
        first = self.model.layers
        return re.escape(self._architecture.body) + rf"layers\.(?:{'|'.join(str(first + k) for k in range(9))})\..+"

    def is_passthrough(self, tensor: str) -> bool:
        """Whether an HF tensor is not part of Megatron's model: stale buffers, the vision tower, MTP layers of a model
        that is used without them."""
        return self._passthrough.fullmatch(tensor) is not None

    def has_prediction(self, names: Iterable[str]) -> bool:
        """Whether any of the named tensors belongs to an MTP layer."""
        pattern = re.compile(self._prediction_pattern)
        return any(pattern.fullmatch(name) for name in names)

    def matrices(self) -> Iterator[Matrix]:
        """Every Megatron matrix, in the order of ``tensors``. Omits a tied head: Megatron keeps the embedding."""
        for rule, i, e in self._entries():
            if not any(self._stand_in(leaf) for leaf in rule.leaves):
                yield self._matrix(rule, i, e)

    def find(self, key: str, lead: tuple[int, ...] = ()) -> Matrix:
        """Find the matrix of a checkpoint entry by key and leading indices (layer, expert).

        Raises:
            UserError: the model of ``config.json`` has no such tensor.
        """
        numbered, expert = split_key(key, lead)
        rules, pattern, i = self._rules_for(numbered)
        rule = rules.get(pattern)
        stacks = rule is not None and "{e}" in rule.leaves[0].name
        if rule is None or stacks != (expert is not None) or not 0 <= (expert or 0) < (self.model.experts or 1):
            raise UserError(
                f"Megatron tensor {numbered}{'' if expert is None else f' (expert {expert})'} has no HF counterpart in "
                f"the model that config.json describes."
            )
        return self._matrix(rule, i, expert)

    def _rules_for(self, key: str) -> tuple[dict[str, Rule], str, int | None]:
        """The rules that may match a key, the key in the rules' form, and the layer in HF's numbering."""
        match = re.match(r"(decoder|mtp)\.layers\.([0-9]{1,9})\.", key)
        if match is None:
            return self._by_key["top"], key, None
        number, rest = int(match[2]), key[match.end(2) :]
        if match[1] == "decoder":
            rules = self._by_key[self._kind(number)] if number < self.model.layers else {}
            return rules, "decoder.layers.{i}" + rest, number
        rules = self._by_key["mtp"] if number < self.model.mtp else {}
        return rules, "mtp.layers.{k}" + rest, self.model.layers + number

    @cached_property
    def _by_key(self) -> dict[Any, dict[str, Rule]]:
        kinds: dict[Any, tuple[Rule, ...]] = {
            "top": (*table.BEFORE, *table.after(self._architecture.head)),
            **self._layer_rules,
            "mtp": self._prediction_rules,
        }
        return {
            kind: {key: rule for rule in rules for key in (rule.key, *rule.aliases)} for kind, rules in kinds.items()
        }

    def _kind(self, layer: int) -> tuple[bool, bool]:
        """Whether the mixer takes the place of attention in a layer, and whether it has experts."""
        return self.model.has_mixer(layer), self.model.has_experts(layer)

    def _entries(self) -> Iterator[tuple[Rule, int | None, int | None]]:
        """Rule, layer in HF's numbering, expert."""
        for rule in table.BEFORE:
            yield rule, None, None
        for i in range(self.model.layers):
            yield from self._layer_entries(self._layer_rules[self._kind(i)], i)
        for rule in table.after(self._architecture.head):
            yield rule, None, None
        for k in range(self.model.mtp):
            yield from self._layer_entries(self._prediction_rules, self.model.layers + k)

    def _layer_entries(self, rules: tuple[Rule, ...], i: int) -> Iterator[tuple[Rule, int, int | None]]:
        per_expert = [rule for rule in rules if "{e}" in rule.leaves[0].name]
        for rule in rules:
            if rule not in per_expert:
                yield rule, i, None
            elif rule is per_expert[0]:
                for e in range(self.model.experts):
                    yield from ((each, i, e) for each in per_expert)

    def _matrix(self, rule: Rule, i: int | None, e: int | None) -> Matrix:
        leaves = [
            (self._stand_in(leaf) or self._name(leaf.name, i, e), leaf.rows or Rows(0, self._shape(leaf)[0]))
            for leaf in rule.leaves
        ]
        counts = [self._count(rows, self._shape(leaf)[0]) for (_, rows), leaf in zip(leaves, rule.leaves, strict=True)]
        number = {} if i is None else {"i": i, "k": i - self.model.layers}
        key, *aliases = (name.format(**number) for name in (rule.key, *rule.aliases))
        parts = self.model.groups or 1 if rule.layout == "qkv" else 1
        pieces, row = [], 0
        for part in range(parts):
            for (name, rows), count in zip(leaves, counts, strict=True):
                n = count // parts
                for first, last in _runs(rows, part * n, (part + 1) * n):
                    pieces.append(Piece((row, row + last - first), name, (first, last)))
                    row += last - first
        shape = (sum(counts), *self._shape(rule.leaves[0])[1:])
        return Matrix(key, e, shape, tuple(pieces), rule, tuple(aliases))

    @staticmethod
    def _count(rows: Rows, of: int) -> int:
        """Number of rows chosen from a tensor that has ``of``."""
        return rows.length if rows.period is None else of // rows.period * rows.length

    def _stand_in(self, leaf: Leaf) -> str | None:
        return self._name(leaf.tied, None) if leaf.tied and self.model.tied else None

    def _name(self, template: str, i: int | None, e: int | None = None) -> str:
        k = None if i is None else i - self.model.layers
        return template.format(body=self._architecture.body, i=i, k=k, e=e)

    def _shape(self, leaf: Leaf) -> tuple[int, ...]:
        return tuple(self._sizes[name] for name in leaf.shape)


def _runs(rows: Rows, first: int, last: int) -> Iterator[Interval]:
    """Runs of a tensor's rows that hold the chosen rows from number ``first`` to ``last``."""
    while first < last:
        run, inside = divmod(first, rows.length)
        n = min(rows.length - inside, last - first)
        start = rows.start + run * (rows.period or 0) + inside
        yield start, start + n
        first += n


def sizes(model: Model) -> dict[str, int]:
    """Named sizes that tables use in shapes."""
    out = {
        "one": 1,
        "hidden": model.hidden,
        "twice_hidden": 2 * model.hidden,
        "vocab": model.vocab,
        "ffn": model.ffn,
        "experts": model.experts,
        "expert_ffn": model.expert_ffn,
        "shared_ffn": model.shared_ffn,
    }
    if model.latent:
        nope, rotated, value = model.nope or 0, model.rotated or 0, model.value or 0
        out |= {
            "q": model.heads * (nope + rotated),
            "q_lora": model.q_lora or 0,
            "kv_lora": model.kv_lora or 0,
            "kv_a": (model.kv_lora or 0) + rotated,
            "kv_b": model.heads * (nope + value),
            "attended": model.heads * value,
        }
    else:
        head = model.head or 0
        query = model.heads * head
        out |= {"head": head, "q": query, "kv": (model.groups or 0) * head}
        out["q_proj"] = 2 * query if model.output_gate else query
    if model.mixer is not None:
        out |= model.mixer.sizes()
    return out


def check_tiling(tensor: str, shape: tuple[int, ...], boxes: Iterable[tuple[Interval, Interval | None]]) -> None:
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


def prove_coverage(table: WeightTable) -> None:
    """Check in both directions that the table neither loses nor repeats anything.

    Every row of every matrix is in exactly one piece, every row of every HF tensor is in exactly one matrix. Raises
    ValueError naming the first violation.
    """
    held: dict[str, list[tuple[Interval, Interval | None]]] = {name: [] for name in table.tensors}
    for matrix in table.matrices():
        row = 0
        for piece in matrix.pieces:
            length = piece.rows[1] - piece.rows[0]
            if piece.rows[0] != row or length != piece.tensor_rows[1] - piece.tensor_rows[0] or piece.tensor is None:
                raise ValueError(f"{matrix.key}: row {row} is not covered once")
            row = piece.rows[1]
            held[piece.tensor].append((piece.tensor_rows, None))
        if row != matrix.shape[0]:
            raise ValueError(f"{matrix.key}: {row} of {matrix.shape[0]} rows are covered")
    for name, boxes in held.items():
        if len(boxes) != len(set(boxes)):
            raise ValueError(f"{name}: rows belong to two Megatron tensors")
        check_tiling(name, table.tensors[name], boxes)

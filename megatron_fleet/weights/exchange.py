"""Weights on their way from the ranks that own them: as HF tensors or in a form that engines load.

A `WeightSource` says who owns what. A `FormattedSource` gathers it whole on every rank, or writes each rank's part into
shared memory; quantised tensors are encoded by their owners before.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Protocol

import torch

from megatron_fleet.platform.communicator import Alone, Communicator, together
from megatron_fleet.weights.mapping import Interval

Box = tuple[Interval, Interval | None]
"""Rows and columns (``None`` = all) of a tensor."""
_ALIGNMENT = 16
"""Tensors begin at multiples of this many bytes in a message, so that any dtype can be viewed in place."""


@dataclass(frozen=True, slots=True)
class ParamMeta:
    """Name, dtype as sent and full shape of one HF tensor (the fields that vLLM's weight-transfer protocol reads)."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Place:
    """This rank's position in the parallel layout.

    Attributes:
        replica: data-parallel (and context-parallel) index; ranks with equal tensor- and pipeline-parallel rank hold
            equal dense weights in all replicas.
        model: ranks that together hold one complete model.
    """

    replica: int = 0
    model: Communicator = field(default_factory=Alone)


@dataclass(frozen=True, slots=True)
class OwnedBox:
    """A box of an HF tensor and the rank that has its values.

    Attributes:
        owner: rank in the ``model`` communicator.
        local, rows: index of the owner's local tensor, and the rows in it.
    """

    owner: int
    box: Box
    local: int
    rows: Interval


class WeightSource(Protocol):
    """The trainer's weights as HF tensors of which ranks own boxes, such as a `MegatronWeightSource`.

    Attributes:
        device: where this rank's values are.
    """

    place: Place
    device: torch.device

    def metadata(self) -> list[ParamMeta]:
        """Metadata of the whole model on every rank, in iteration order."""
        ...

    def groups(self) -> list[list[str]]:
        """Names in iteration order, split where the transformer layer changes: the unit of gathering."""
        ...

    def owned(self, tensor: str) -> Sequence[OwnedBox]:
        """The boxes that make up a tensor, the same on every rank."""
        ...

    def values(self, owned: OwnedBox) -> torch.Tensor:
        """Values of a box of which this rank is the owner, of any float dtype."""
        ...


class Form(Protocol):
    """Form in which tensors are sent; its answers are the same on every rank."""

    def parts(self, meta: ParamMeta) -> list[ParamMeta]:
        """The tensors that a tensor is sent as."""
        ...

    def boxes(self, tensor: str, box: Box) -> list[Box] | None:
        """Boxes of the ``parts`` that depend on nothing but a box of the tensor; ``None``: there are none, because the
        box ends inside a block whose values are encoded together.
        """
        ...

    def encode(self, tensor: str, values: torch.Tensor, box: Box) -> list[torch.Tensor]:
        """Encode the values of a box as the ``boxes`` of the parts, on their device.

        Raises UserError if the form cannot hold them.
        """
        ...


class AsHeld:
    """`Form` of tensors that are sent as they are."""

    def parts(self, meta: ParamMeta) -> list[ParamMeta]:
        return [meta]

    def boxes(self, tensor: str, box: Box) -> list[Box]:
        return [box]

    def encode(self, tensor: str, values: torch.Tensor, box: Box) -> list[torch.Tensor]:
        return [values]


@dataclass(frozen=True, slots=True)
class _Piece:
    """Boxes of a tensor that one rank sends.

    Attributes:
        owned: boxes of the tensor that follow each other by rows and together are ``box``.
        places: box of each tensor that the tensor is exchanged as.
    """

    owner: int
    owned: tuple[OwnedBox, ...]
    box: Box
    places: tuple[Box, ...]


@dataclass(frozen=True, slots=True)
class _Exchange:
    """Exchange of a tensor between ranks.

    Attributes:
        metas: tensors that it is exchanged as: its parts, or itself.
        whole_first: it is encoded after it was put together, because a rank's box ends inside a block.
    """

    metas: tuple[ParamMeta, ...]
    pieces: tuple[_Piece, ...]
    whole_first: bool


@dataclass(frozen=True, slots=True)
class _Slot:
    """A box of a tensor, and its byte offset in a message."""

    meta: ParamMeta
    box: Box
    offset: int

    def view(self, message: torch.Tensor) -> torch.Tensor:
        shape = _box_shape(self.box, self.meta.shape)
        nbytes = math.prod(shape) * self.meta.dtype.itemsize
        return message[self.offset : self.offset + nbytes].view(self.meta.dtype).view(shape)


class FormattedSource:
    """A source's tensors in a form, with the two methods that vLLM's trainer engines call.

    Owners encode their boxes before anything is exchanged, so quantised tensors travel as codes and scales. Where a
    rank's box ends inside a block, the tensor travels as it is held and is encoded whole.

    Attributes:
        whole_first: names of these tensors.
    """

    def __init__(self, source: WeightSource, form: Form, ranks: Communicator | None = None) -> None:
        """Args: ``ranks``: all that iterate in lockstep; by default those of ``source.place.model``."""
        self._source, self._form = source, form
        self._ranks = ranks or source.place.model
        self._metadata = {meta.name: meta for meta in source.metadata()}
        self._parts = {name: form.parts(meta) for name, meta in self._metadata.items()}
        self._exchanges = {name: self._exchange(meta) for name, meta in self._metadata.items()}
        self._encodes = any(parts != [self._metadata[name]] for name, parts in self._parts.items())
        self.whole_first = frozenset(name for name, each in self._exchanges.items() if each.whole_first)

    def metadata(self) -> list[ParamMeta]:
        """Metadata of the parts of all tensors, in iteration order."""
        return [part for parts in self._parts.values() for part in parts]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, whole tensor) of every part on every rank; a fresh pass each time.

        Collective over ``place.model``: its ranks iterate in lockstep. Only one layer is gathered at a time, on the
        source's device, in one broadcast per layer and owner. If a rank fails to encode its boxes, the ranks iterate
        further and all of them raise before the last layer is yielded.

        Raises:
            UserError: the form cannot hold a rank's values (NaN or infinity).
            PeerError: another rank failed for another reason.
        """
        failures: list[Exception] = []
        groups = self._source.groups()
        for number, group in enumerate(groups, 1):
            parts = self._gather(group, failures)
            if number == len(groups):
                with together(self._ranks) if self._encodes else nullcontext():
                    if failures:
                        raise failures[0]
            yield from parts
            del parts  # before the next layer is gathered

    @torch.no_grad()
    def write_local(self, tensors: Iterable[str], memory: Mapping[str, torch.Tensor]) -> None:
        """Write what this rank owns of some tensors. No communication.

        Args:
            memory: name → whole tensor in memory that the ranks share, for every part of the tensors; of a tensor in
                ``whole_first`` for the tensor itself. Values are cast to its dtype.

        Raises:
            UserError: the form cannot hold the values (NaN or infinity).
        """
        for name in tensors:
            exchange = self._exchanges[name]
            for piece in exchange.pieces:
                if piece.owner == self._source.place.model.rank:
                    for meta, box, part in zip(exchange.metas, piece.places, self._encoded(name, piece), strict=True):
                        _box_view(box, memory[meta.name]).copy_(part)

    @torch.no_grad()
    def _gather(self, group: Sequence[str], failures: list[Exception]) -> list[tuple[str, torch.Tensor]]:
        """(name, whole tensor) of every part of a group; errors of this rank are added to ``failures``."""
        model = self._source.place.model
        pieces: dict[int, list[tuple[str, _Piece]]] = {}
        for name in group:
            for piece in self._exchanges[name].pieces:
                pieces.setdefault(piece.owner, []).append((name, piece))
        messages = {owner: self._layout(sent) for owner, sent in sorted(pieces.items())}
        own: torch.Tensor | None = None
        if model.rank in messages:  # before the first broadcast: all owners encode at the same time
            own = self._message(*messages[model.rank], pieces[model.rank], failures)
        whole = {
            meta.name: torch.empty(meta.shape, dtype=meta.dtype, device=self._source.device)
            for name in group
            for meta in self._exchanges[name].metas
        }
        for owner, (nbytes, slots) in messages.items():
            message, own = (own, None) if owner == model.rank else (None, own)
            if message is None:
                message = torch.empty(nbytes, dtype=torch.uint8, device=self._source.device)
            model.broadcast(message, owner)
            for slot in slots:
                _box_view(slot.box, whole[slot.meta.name]).copy_(slot.view(message))
            del message  # before the next one is received
        return [part for name in group for part in self._whole_parts(name, whole, failures)]

    def _layout(self, pieces: Iterable[tuple[str, _Piece]]) -> tuple[int, list[_Slot]]:
        """Size of an owner's message, and where its boxes are in it."""
        end, slots = 0, []
        for name, piece in pieces:
            for meta, box in zip(self._exchanges[name].metas, piece.places, strict=True):
                slots.append(_Slot(meta, box, end))
                nbytes = math.prod(_box_shape(box, meta.shape)) * meta.dtype.itemsize
                end += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        return end, slots

    def _message(
        self, nbytes: int, slots: Iterable[_Slot], pieces: Iterable[tuple[str, _Piece]], failures: list[Exception]
    ) -> torch.Tensor:
        """This rank's message; zeros after an error, which is added to ``failures``."""
        message = torch.empty(nbytes, dtype=torch.uint8, device=self._source.device)
        places = iter(slots)
        try:
            for name, piece in pieces:
                for part in self._encoded(name, piece):
                    next(places).view(message).copy_(part)
        except Exception as e:
            failures.append(e)
            message.zero_()
        return message

    def _encoded(self, name: str, piece: _Piece) -> list[torch.Tensor]:
        values = [self._source.values(owned) for owned in piece.owned]
        if self._exchanges[name].whole_first:
            return values
        return self._form.encode(name, values[0] if len(values) == 1 else torch.cat(values), piece.box)

    def _whole_parts(
        self, name: str, exchanged: Mapping[str, torch.Tensor], failures: list[Exception]
    ) -> list[tuple[str, torch.Tensor]]:
        """(name, whole tensor) of a tensor's parts; zeros after an error, which is added to ``failures``."""
        if not self._exchanges[name].whole_first:
            return [(part.name, exchanged[part.name]) for part in self._parts[name]]
        whole = exchanged[name]
        try:
            coded = self._form.encode(name, whole, ((0, len(whole)), None))
        except Exception as e:
            failures.append(e)
            coded = [torch.zeros(part.shape, dtype=part.dtype, device=whole.device) for part in self._parts[name]]
        return [(part.name, tensor) for part, tensor in zip(self._parts[name], coded, strict=True)]

    def _exchange(self, meta: ParamMeta) -> _Exchange:
        parts, owned = self._parts[meta.name], self._source.owned(meta.name)
        if parts != [meta]:
            runs = _runs(owned)
            boxes = [((run[0].box[0][0], run[-1].box[0][1]), run[0].box[1]) for run in runs]
            places = [self._form.boxes(meta.name, box) for box in boxes]
            pieces = tuple(
                _Piece(run[0].owner, tuple(run), box, tuple(place))
                for run, box, place in zip(runs, boxes, places, strict=True)
                if place is not None
            )
            if len(pieces) == len(runs):
                return _Exchange(tuple(parts), pieces, whole_first=False)
        pieces = tuple(_Piece(each.owner, (each,), each.box, (each.box,)) for each in owned)
        return _Exchange((meta,), pieces, whole_first=parts != [meta])


def _runs(owned: Iterable[OwnedBox]) -> list[list[OwnedBox]]:
    """Join the boxes of an owner that follow each other by rows."""
    runs: list[list[OwnedBox]] = []
    for each in sorted(owned, key=lambda each: (each.owner, each.box[1] or (0, 0), each.box[0])):
        last = runs[-1][-1] if runs else None
        if last is not None and (last.owner, last.box[1], last.box[0][1]) == (each.owner, each.box[1], each.box[0][0]):
            runs[-1].append(each)
        else:
            runs.append([each])
    return runs


def _box_shape(box: Box, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of a box of a tensor of a shape."""
    rows, cols = box
    return (rows[1] - rows[0], *((cols[1] - cols[0],) if cols else shape[1:]))


def _box_view(box: Box, tensor: torch.Tensor) -> torch.Tensor:
    """View of a box of a tensor."""
    rows = tensor[slice(*box[0])]
    return rows if box[1] is None else rows[:, slice(*box[1])]


def layer_groups(names: Iterable[str]) -> list[list[str]]:
    """Group HF names by transformer layer: names before the first layer, each layer, the rest.

    Matches ``layerwise_groups`` of vLLM 0.32 (``distributed/weight_transfer/base.py``), by which its engines number the
    groups.
    """
    before: list[str] = []
    after: list[str] = []
    layers: dict[tuple[str, int], list[str]] = {}
    for name in names:
        match = re.match(r"(.*?)\.(\d+)\.", name)
        if match is not None:
            layers.setdefault((match[1], int(match[2])), []).append(name)
        else:
            (after if layers else before).append(name)
    stacks = list(dict.fromkeys(stack for stack, _ in layers))
    ordered = sorted(layers, key=lambda key: (stacks.index(key[0]), key[1]))
    return [group for group in (before, *(layers[key] for key in ordered), after) if group]

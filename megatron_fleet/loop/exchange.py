"""How the driver (rank 0) and the other ranks share plain Python values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")


class DriverFailed(Exception):
    """Raised on the other ranks when the driver's part of a shared step failed; the driver raises the cause itself."""


class Exchange:
    """Collective sharing over a CPU process group that spans all ranks.

    Every method is collective: all ranks call it, in the same order. A failure of the driver's function reaches every
    rank, so that none waits for a broadcast that never comes.
    """

    def __init__(self, group: dist.ProcessGroup | None = None):
        self._group = group
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()

    @property
    def is_driver(self) -> bool:
        return self.rank == 0

    def share(self, produce: Callable[..., T] | None, *args: Any) -> T:
        """Run ``produce(*args)`` on the driver and return its result on every rank; others may pass ``None``."""
        box, failure = self._produce(produce, args)
        dist.broadcast_object_list(box, src=0, group=self._group)
        return self._unwrap(box[0], failure)

    def scatter(self, produce: Callable[..., Sequence[T]] | None, *args: Any) -> T:
        """Run ``produce(*args)`` on the driver; rank r receives item r of its result."""
        box, failure = self._produce(produce, args)
        out: list[Any] = [None]
        if self.is_driver:
            ok, value = box[0]
            items = [(ok, v) for v in value] if ok else [box[0]] * self.size
            dist.scatter_object_list(out, items, src=0, group=self._group)
        else:
            dist.scatter_object_list(out, None, src=0, group=self._group)
        return self._unwrap(out[0], failure)

    def _produce(
        self, produce: Callable[..., Any] | None, args: tuple[Any, ...]
    ) -> tuple[list[Any], BaseException | None]:
        if not self.is_driver:
            return [None], None
        assert produce is not None, "the driver is on rank 0"
        try:
            return [(True, produce(*args))], None
        except BaseException as error:
            return [(False, None)], error

    def _unwrap(self, answer: tuple[bool, Any], failure: BaseException | None) -> Any:
        if failure is not None:
            raise failure
        ok, value = answer
        if not ok:
            raise DriverFailed("the driver (rank 0) failed; its message tells why")
        return value

"""Members of an update's group find each other at a store that rank 0 of the trainer opens."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, TCPStore

OPEN_S = 1800.0
"""Engines wait so long for rank 0, which may have other verbs to execute before. They notice at once when it dies."""
JOIN_S = 60.0
"""Rank 0 waits so long for engines that have registered."""
_LAYOUT, _MEMBERS, _READY, _SIZE = "layout", "members", "ready", "size"


class GroupBroken(RuntimeError):
    """A member died or fell silent: the group is of no more use."""


class Rendezvous:
    """Rank 0's side.

    The port is bound here, once, and never free in between. A store asks nobody who they are: its keys begin with a
    secret, which goes to the engines with the address.
    """

    def __init__(self, address: str, layout: str) -> None:
        """Listen.

        Args:
            address: of this host, as engines reach it.
            layout: all that members must know of the buckets.

        Raises:
            OSError: this host does not have the address.
        """
        listener = socket.create_server((address, 0), backlog=1024)
        port = listener.getsockname()[1]
        secret = secrets.token_hex(16)
        server = TCPStore(
            address,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=JOIN_S),
            master_listen_fd=listener.detach(),
        )
        self.address = address
        self.store = PrefixStore(secret, server)
        self.store.set(_LAYOUT, layout)
        self.init_info: dict[str, Any] = {"address": address, "port": port, "secret": secret}

    def meet(self) -> int:
        """Accept no more members and wait until all are ready; returns the size of the group, rank 0 included.

        Raises:
            GroupBroken: one of them was not ready within ``JOIN_S``.
        """
        size = 1 + int(self.store.add(_MEMBERS, 0))
        with _broken(f"not all {size - 1} engine workers that registered came"):
            if size > 1:
                self.store.wait([f"{_READY}/{number}" for number in range(1, size)], timedelta(seconds=JOIN_S))
            self.store.set(_SIZE, str(size))
        return size


class Membership:
    """An engine worker's side.

    Attributes:
        number: rank in the group, from 1; 0 before `register`.
        own_address: of this host, on the way to rank 0.
        layout: as rank 0 set it.
    """

    def __init__(self, address: str, port: int, secret: str) -> None:
        """Connect. Raises OSError or a torch.distributed error when nobody answers."""
        with socket.create_connection((address, port), JOIN_S) as probe:
            self.own_address = probe.getsockname()[0]
        client = TCPStore(address, port, is_master=False, timeout=timedelta(seconds=JOIN_S))
        self.store = PrefixStore(secret, client)
        self.layout = self.store.get(_LAYOUT).decode()
        self.number = 0

    def register(self) -> None:
        """Become a member of the coming group."""
        self.number = int(self.store.add(_MEMBERS, 1))

    def meet(self) -> int:
        """Wait until all members are ready; returns the size of the group. Raises `GroupBroken`."""
        with _broken("rank 0 of the trainer did not come"):
            self.store.set(f"{_READY}/{self.number}", "")
            self.store.wait([_SIZE], timedelta(seconds=OPEN_S))
            return int(self.store.get(_SIZE))


@contextmanager
def _broken(what: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as e:  # torch.distributed's errors are such
        raise GroupBroken(f"{what}: {e}") from e

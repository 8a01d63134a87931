"""Rendezvous of an update group's members, at a store opened by rank 0 of the trainer."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, TCPStore

OPEN_S = 1800.0
"""Engines' timeout for rank 0, which may have other work to do first. They notice immediately if it dies."""
JOIN_S = 60.0
"""Rank 0's timeout for engines that have registered."""
_LAYOUT, _MEMBERS, _READY, _SIZE = "layout", "members", "ready", "size"


class GroupBroken(RuntimeError):
    """A member died or stopped responding; the group is unusable."""


class Rendezvous:
    """Rank 0's side of the rendezvous.

    The port is bound here, once, and never released in between. A store does not authenticate clients, so its keys
    begin with a secret that is passed to the engines with the address: strangers do not take part by accident. A client
    that can connect may still list the keys.
    """

    def __init__(self, address: str, layout: str) -> None:
        """Listen.

        Args:
            address: of this host, as reachable by engines.
            layout: description of the buckets, with everything that members need.

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
        """Close registration and wait until all members are ready; return the group size, including rank 0.

        Raises:
            GroupBroken: a member was not ready within ``JOIN_S``.
        """
        size = 1 + int(self.store.add(_MEMBERS, 0))
        with _broken(f"not all {size - 1} engine workers that registered came"):
            if size > 1:
                self.store.wait([f"{_READY}/{number}" for number in range(1, size)], timedelta(seconds=JOIN_S))
            self.store.set(_SIZE, str(size))
        return size


class Membership:
    """An engine worker's side of the rendezvous.

    Attributes:
        number: rank in the group, from 1; 0 before `register`.
        own_address: this host's address on the route to rank 0.
        layout: as published by rank 0.
    """

    def __init__(self, address: str, port: int, secret: str) -> None:
        """Connect. Raises OSError or a torch.distributed error if nothing answers."""
        with socket.create_connection((address, port), JOIN_S) as probe:
            self.own_address = probe.getsockname()[0]
        client = TCPStore(address, port, is_master=False, timeout=timedelta(seconds=JOIN_S))
        self.store = PrefixStore(secret, client)
        self.layout = self.store.get(_LAYOUT).decode()
        self.number = 0

    def register(self) -> None:
        """Join the next group."""
        self.number = int(self.store.add(_MEMBERS, 1))

    def meet(self) -> int:
        """Wait until all members are ready; return the group size. Raises `GroupBroken`."""
        with _broken("rank 0 of the trainer did not come"):
            self.store.set(f"{_READY}/{self.number}", "")
            self.store.wait([_SIZE], timedelta(seconds=OPEN_S))
            return int(self.store.get(_SIZE))


@contextmanager
def _broken(what: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as e:  # the base class of torch.distributed's errors
        raise GroupBroken(f"{what}: {e}") from e

"""Ports for programs that must be told theirs, and for addresses at which nobody is to listen."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager


@contextmanager
def held_ports(count: int) -> Iterator[list[int]]:
    """Ports of loopback that the kernel gives to nobody else within.

    They stay bound here, with SO_REUSEADDR and without listening: a connection to one is refused, and a program that
    sets SO_REUSEADDR, as asyncio, libuv, Go and ``http.server`` do, can listen at it all the same.
    """
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for s in sockets:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            s.bind(("127.0.0.1", 0))
        yield [s.getsockname()[1] for s in sockets]

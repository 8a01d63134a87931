"""Ranks without a model: they dial a controller, take everything that real ranks get, and answer at once.

    python benchmarks/emulated_ranks.py --world 64 --tensor 8     (MFLEET_CONTROLLER and MFLEET_TOKEN are set)

With ``--tensor`` t each t ranks are one replica. Prints one line of JSON at the end: bytes received by each rank.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from typing import Any

from megatron_fleet.cluster import frames, handshake
from megatron_fleet.cluster.rank_identity import controller_address
from megatron_fleet.trainer.base import Examination, LossReport, OptimReport, as_plain
from megatron_fleet.trainer.messages import Identity, RankReady

LIMIT = 64 << 20


class EmulatedRank:
    """One rank.

    Attributes:
        calls: verbs that it served.
        data_bytes: bytes of micro-batches that it was sent.
    """

    def __init__(self, rank: int, world: int, tensor: int) -> None:
        self.rank, self.world, self.tensor = rank, world, tensor
        self.calls: list[str] = []
        self.data_bytes = 0
        self._writer: asyncio.StreamWriter

    async def dial(self, address: str, token: str) -> bool:
        """Connect and say who it is; whether the controller took it."""
        host, port = address.rsplit(":", 1)
        self._reader, self._writer = await asyncio.open_connection(host, int(port), limit=LIMIT)
        who = Identity(self.rank, self.world, self.rank, "emulated", os.getpid(), "emulated")
        proof = await handshake.dial(self._reader, self._writer, token)
        self._writer.write(frames.pack("rank", proof, who.to_plain()))
        answer = await frames.read(self._reader)
        return answer is not None and answer[0] == "config"

    async def serve(self) -> None:
        """Answer every call until the controller says ``quit`` or is gone."""
        while (frame := await frames.read(self._reader)) is not None and frame[0] != "quit":
            _, call, verb, arguments, following = frame
            bodies = [(await frames.read(self._reader) or [b""])[-1] for _ in range(following)]
            self.data_bytes += sum(map(len, bodies))
            self.calls.append(verb)
            self._writer.write(frames.pack("done", call, self._answer(verb, arguments, bodies), 0.0, 0.0))
            await self._writer.drain()
        self._writer.close()

    def _answer(self, verb: str, arguments: dict[str, Any], bodies: list[bytes]) -> Any:
        if verb == "bind":
            return "127.0.0.1:1"
        if verb == "build":
            ready = RankReady(self.rank // self.tensor, self.world // self.tensor, 1000, "cpu", {})
            return as_plain(ready)
        if verb == "forward_backward":
            return {"report": as_plain(LossReport(0.0, {"tokens": 1.0})), "sequences": None}
        if verb == "optim_step":
            return as_plain(OptimReport(1.0, arguments["adam"]["lr"], skipped=False))
        if verb == "examine":
            return {"faults": as_plain(Examination([], [], 1)) | {"micro_batches": []}, "micro_batches": []}
        if verb == "memory":
            return {"process": 1}
        return None


async def main(world: int, tensor: int) -> None:
    address, token = controller_address(os.environ)
    ranks = [EmulatedRank(rank, world, tensor) for rank in range(world)]
    for rank in ranks:
        assert await rank.dial(address, token)
    await asyncio.gather(*(rank.serve() for rank in ranks))
    print(json.dumps({"data_bytes": [rank.data_bytes for rank in ranks]}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--world", type=int, required=True)
    parser.add_argument("--tensor", type=int, default=1)
    given = parser.parse_args()
    asyncio.run(main(given.world, given.tensor))

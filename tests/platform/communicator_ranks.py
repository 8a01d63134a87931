"""Two ranks use every exchange of the communicator and record what they got."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from megatron_fleet.platform.communicator import TorchCommunicator, join, leave


def main(folder: Path) -> None:
    join("gloo")
    world = TorchCommunicator()
    summed, greatest = torch.tensor([world.rank + 1, 1]), torch.tensor([world.rank, -world.rank])
    world.sum_(summed)
    world.max_(greatest)
    alone = world.split(world.rank, 60)
    found = {
        "gathered": world.all_gather({"rank": world.rank}),
        "value": world.broadcast_value(["of", world.rank], 1),
        "bytes": [world.broadcast_bytes(data * (1 - world.rank), 0).decode() for data in (b"large" * 1000, b"")],
        "sum": summed.tolist(),
        "max": greatest.tolist(),
        "alone": [alone.rank, alone.size, alone.broadcast_value(world.rank, 0)],
        "both": world.split(0, 60).all_gather(world.rank),
    }
    (folder / f"{world.rank}.json").write_text(json.dumps(found))
    world.barrier()
    leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""`mfleet train`, interrupted where its loop waits. Arguments: a file for the places where it waited, the place to
interrupt as ``inner|outer`` or nothing, the number of the signal, and those of `mfleet`.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

from interruptions import Interruptions, Moment, Place

from megatron_fleet import cli
from megatron_fleet.loop import main, stopping


def run(log: Path, place: str, number: int, arguments: list[str]) -> int:
    moments = [Moment(Place(*place.split("|")), 1, signal.Signals(number))] if place else []
    with log.open("w", buffering=1) as places:
        interruptions = Interruptions(*moments, told=lambda there: print(*there, sep="|", file=places))

        async def until_stopped(work, time_limit_s=None):
            async def watched(stop):
                interruptions.install()
                await asyncio.create_task(work(stop))

            return await stopping.until_stopped(watched, time_limit_s)

        main.until_stopped = until_stopped
        return cli.main(arguments)


if __name__ == "__main__":
    sys.exit(run(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4:]))

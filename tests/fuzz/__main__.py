"""Tries inputs until Ctrl-C, or as many as asked for; see the package."""

from __future__ import annotations

import argparse
import faulthandler
import itertools
import resource
import sys
import time
from collections import Counter

from fuzz import engine, trees

TURN = 200
"""Inputs of one surface before the next one's turn."""
MEMORY = 24 << 30
"""Bytes of address space: what asks for more is a finding, not the end of the machine."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m fuzz", description="Try random inputs on the program.")
    parser.add_argument("--surface", action="append", help="only this one; may be repeated (default: all)")
    parser.add_argument("--inputs", type=int, default=0, help="of each surface (default: without end)")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="(default: the time)")
    parser.add_argument("--only", type=int, help="the number of one input, to be shown and tried alone")
    parser.add_argument("--save", action="store_true", help="put what is found into the corpus, as small as may be")
    args = parser.parse_args()
    chosen = [surface for surface in engine.surfaces() if args.surface is None or surface.name in args.surface]
    if args.surface and len(chosen) != len(args.surface):
        parser.error(f"surfaces are {', '.join(surface.name for surface in engine.surfaces())}")
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    if args.only is not None:
        return _show(chosen[0], args.seed, args.only)
    return _run(chosen, args.seed, args.inputs or sys.maxsize, args.save)


def _show(surface: engine.Surface, seed: int, number: int) -> int:
    tree = engine.make(surface, seed, number)
    print(trees.to_text(tree)[:20_000])
    finding = engine.attempt(surface, tree, number)
    print("fine" if finding is None else finding.told)
    return 0 if finding is None else 1


def _run(chosen: list[engine.Surface], seed: int, inputs: int, save: bool) -> int:
    kinds, done, spent = Counter[tuple[str, str]](), Counter[str](), Counter[str]()
    try:
        for first in itertools.count(0, TURN):
            turn = range(first, min(first + TURN, inputs))
            if not turn:
                break
            for surface in chosen:
                started = time.monotonic()
                # What neither an alarm nor Ctrl-C ends, as a loop in a compiled library.
                faulthandler.dump_traceback_later(60 + 12 * TURN, exit=True)
                for finding in engine.run(surface, seed, turn):
                    kinds[surface.name, finding.kind] += 1
                    if kinds[surface.name, finding.kind] == 1:
                        _tell(surface, finding, seed, save)
                done[surface.name] += len(turn)
                spent[surface.name] += time.monotonic() - started
            total, seconds = sum(done.values()), sum(spent.values())
            print(f"{total} inputs, {total / seconds:.0f}/s, {len(kinds)} findings", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        pass
    faulthandler.cancel_dump_traceback_later()
    for name in done:
        own = sum(kind[0] == name for kind in kinds)
        print(f"{name:20} {done[name]:9} inputs {done[name] / max(spent[name], 1e-9):8.0f}/s {own} findings")
    return 1 if kinds else 0


def _tell(surface: engine.Surface, finding: engine.Finding, seed: int, save: bool) -> None:
    last = finding.told.strip().splitlines()[-1]
    print(f"{surface.name}: {finding.kind}: {last[:300]}\n  {engine.reproduction(finding, seed)}", flush=True)
    if save:
        print(f"  {engine.save(surface, engine.shrunk(surface, finding))}", flush=True)


if __name__ == "__main__":
    sys.exit(main())

"""Plays ``mfleet convert to-hf`` and ``check`` in tests of exports, as a file ``orders`` in the run's folder says.

``orders`` is an object: ``hold`` = wait until it says otherwise, ``fail`` = a line to end with, ``mean`` = result of
checks. Each call appends its command and step to ``calls``.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from pathlib import Path


def main(command: str, source: str, out: str, *options: str) -> int:
    place = Path(out if command == "to-hf" else source)
    run = place.parents[1] if place.parent.name == "exports" else place.parent

    def orders() -> dict[str, object]:
        return json.loads((run / "orders").read_text()) if (run / "orders").exists() else {}

    with (run / "calls").open("a") as calls:
        calls.write(f"{command} {place.name} {os.getpid()} {os.getpriority(os.PRIO_PROCESS, 0)}\n")
    if "fail" in orders():
        print(f"error: {orders()['fail']}", file=sys.stderr)
        return 2
    if command == "check":
        mean = orders().get("mean", 0.0)
        result = {"step": 0, "tokens": 124, "mean": mean, "largest": mean}
        Path(options[options.index("--write") + 1]).write_text(json.dumps(result))
        return int(mean > float(options[options.index("--tolerance") + 1]))
    partial = place.with_name(f".{place.name}.partial")
    partial.mkdir(exist_ok=True)
    digest = hashlib.sha256((Path(source) / "manifest.json").read_bytes()).hexdigest()
    (partial / "conversion.json").write_text(json.dumps({"manifest_sha256": digest}))
    (partial / "model.safetensors").write_text(Path(source, "weights").read_text())
    while orders().get("hold"):
        time.sleep(0.01)
    (partial / "config.json").write_text("{}")
    partial.rename(place)
    return 0


if __name__ == "__main__":
    assert sys.argv[1] == "convert"
    sys.exit(main(*sys.argv[2:]))

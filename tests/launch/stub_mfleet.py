"""Stand-in for `mfleet` in tests of the launch scripts: ``train`` gathers ranks, ``rank`` connects and obeys, ``node``
writes its host's name to $STUB_FOLDER/nodes and stays until the controller has ended (status 0) or is gone (3).

``train`` writes what it sees to $STUB_FOLDER/train.jsonl. Overrides that start with ``stub.`` are for it:
``stub.world=N`` ranks are gathered; ``stub.status=N``: it ends at once; ``stub.restart``: it loses a rank once;
``stub.nodes=N``: it waits until so many nodes have found it; ``stub.ends=N``: its status in the end; ``stub.wait``: it
waits for SIGTERM or SIGUSR1; ``stub.saves``: it then ends as a run that has saved, and an attempt with run.resume
ends by itself, except with ``stub.again``.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_fleet.cluster.rank_identity import controller_address, listen_at, rank_identity
from megatron_fleet.storage.local import write_atomically

GIVES_UP_S = 600.0
"""A rank or node waits so long for the controller."""


def train(overrides: list[str]) -> int:
    stub = dict(o.removeprefix("stub.").partition("=")[::2] for o in overrides if o.startswith("stub."))
    report({"overrides": [o for o in overrides if not o.startswith("stub.")], "host": socket.gethostname()})
    if "status" in stub:
        return int(stub["status"])
    place, token = listen_at(os.environ), os.environ["MFLEET_TOKEN"]
    resumed = "again" not in stub and any(o.startswith("run.resume=") for o in overrides)

    def stop(number: int, _frame: object) -> None:
        report({"stopped": signal.Signals(number).name})
        Path(os.environ["STUB_FOLDER"], "ended").touch()
        sys.exit(os.EX_TEMPFAIL if "saves" in stub else 128 + number)

    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, stop)
    with socket.create_server((place.host, place.port)) as listener:
        if place.file is not None:
            write_atomically(place.file, f"{place.host}:{listener.getsockname()[1]}".encode())
        for command in ["die", "quit"] if "restart" in stub else ["quit"]:
            ranks = gather(listener, token, int(stub.get("world", 0)))
            report({"ranks": [who for who, _ in ranks]})
            while lines("joined") < int(stub.get("nodes", 0)):
                time.sleep(0.1)
            while "wait" in stub and not resumed:
                time.sleep(1)
            for who, connection in ranks:
                connection.sendall(command.encode() if who["rank"] == 1 else b"quit")
                connection.close()
    Path(os.environ["STUB_FOLDER"], "ended").touch()
    return int(stub.get("ends", 0))


def gather(listener: socket.socket, token: str, world: int) -> list[tuple[Any, socket.socket]]:
    ranks = []
    while len(ranks) < world:
        connection, _ = listener.accept()
        line = connection.makefile().readline()
        if line:  # else it only looked whether somebody listens
            who = json.loads(line)
            assert who.pop("token") == token
            ranks.append((who, connection))
    return sorted(ranks, key=lambda rank: rank[0]["rank"])


def rank() -> int:
    me = asdict(rank_identity(os.environ))
    address, token = controller_address(os.environ)
    host, port = address.rsplit(":", 1)
    deadline = time.monotonic() + GIVES_UP_S
    while True:
        try:
            connection = socket.create_connection((host, int(port)), timeout=60)
            break
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.1)
    connection.sendall((json.dumps(me | {"token": token}) + "\n").encode())
    return 0 if connection.recv(10) == b"quit" else 1


def node() -> int:
    address, _ = controller_address(os.environ)
    host, port = address.rsplit(":", 1)
    with Path(os.environ["STUB_FOLDER"], "nodes").open("a") as file:
        file.write(f"{socket.gethostname()}\n")
    deadline = time.monotonic() + GIVES_UP_S
    while not listens(host, int(port)):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    with Path(os.environ["STUB_FOLDER"], "joined").open("a") as file:
        file.write(f"{socket.gethostname()}\n")
    while listens(host, int(port)):
        time.sleep(0.2)
    return 0 if Path(os.environ["STUB_FOLDER"], "ended").exists() else 3


def doctor() -> int:
    """End with $STUB_DOCTOR, after noting where it was asked, and for how many hosts."""
    nodes = [argument for argument in sys.argv if argument.startswith("cluster.nodes=")]
    with Path(os.environ["STUB_FOLDER"], "asked").open("a") as file:
        file.write(f"{socket.gethostname()} {os.environ.get('MFLEET_CONTROLLER', '')} {' '.join(nodes)}\n")
    return int(os.environ["STUB_DOCTOR"])


def lines(name: str) -> int:
    file = Path(os.environ["STUB_FOLDER"], name)
    return len(file.read_text().splitlines()) if file.exists() else 0


def listens(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=60).close()
        return True
    except OSError:
        return False


def report(value: dict[str, Any]) -> None:
    with Path(os.environ["STUB_FOLDER"], "train.jsonl").open("a") as file:
        file.write(json.dumps(value) + "\n")


if __name__ == "__main__":
    if sys.argv[1] == "config":
        kept = [argument for argument in sys.argv[1:] if not argument.startswith("stub.")]
        sys.exit(subprocess.run([sys.executable, "-m", "megatron_fleet.cli", *kept], check=False).returncode)
    sys.exit(
        train(sys.argv[2:]) if sys.argv[1] == "train" else {"rank": rank, "node": node, "doctor": doctor}[sys.argv[1]]()
    )

"""Secrets planted into the environment of a command, and the processes of the command that hold one."""

from __future__ import annotations

import contextlib
import hashlib
import subprocess
import threading
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import psutil

NAMES = (
    *("WANDB_API_KEY", "WANDB_API_KEY_COMPUTER_USE", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "FLEET_API_KEY"),
    *("OPENAI_API_KEY", "OPENAI_API_KEY_ADMIN", "SLACK_BOT_TOKEN", "SOME_API_KEY", "PGPASSWORD", "GITHUB_PAT"),
    *("HF_TOKEN", "MLFLOW_TRACKING_PASSWORD", "DATABASE_URL", "MLFLOW_TRACKING_URI"),
)
MARKERS = {name: hashlib.sha1(name.encode()).hexdigest() for name in NAMES}
"""Parts of the planted values; as long as a key of W&B has to be."""
PLANTED = MARKERS | {
    "SLACK_BOT_TOKEN": f"xoxb-{MARKERS['SLACK_BOT_TOKEN']}",
    "DATABASE_URL": f"postgresql://user:{MARKERS['DATABASE_URL']}@host/db",
    "MLFLOW_TRACKING_URI": f"http://user:{MARKERS['MLFLOW_TRACKING_URI']}@127.0.0.1:9",
}
LOOK_EVERY_S = 0.1


def found_in(data: bytes) -> set[str]:
    """Names of the secrets in ``data``."""
    return {name for name, marker in MARKERS.items() if marker.encode() in data}


@contextlib.contextmanager
def watched(process: subprocess.Popen[str]) -> Iterator[dict[str, set[str]]]:
    """Look at all descendants of ``process`` again and again; command line of each → names of the secrets that its
    environment or its arguments hold."""
    held: dict[str, set[str]] = defaultdict(set)
    over = threading.Event()

    def look() -> None:
        with contextlib.suppress(psutil.Error):
            root = psutil.Process(process.pid)
            own = _of(process.pid, "cmdline")
            while not over.wait(LOOK_EVERY_S):
                for child in root.children(recursive=True):
                    # Command line first: a process that is seen between fork and exec has its parent's, and is passed.
                    arguments = _of(child.pid, "cmdline")
                    if arguments and arguments != own:
                        held[arguments.replace(b"\0", b" ").decode(errors="replace")] |= found_in(
                            _of(child.pid, "environ") + arguments
                        )

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield held
    finally:
        over.set()
        thread.join()


def _of(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""

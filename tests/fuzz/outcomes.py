"""Allowed outcomes of an input: a value, or one sentence."""

from __future__ import annotations

import gc
import io
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

from megatron_fleet import cli
from megatron_fleet.config.errors import UserError, printable

WAITING = 30
SECONDS = 10
"""Limit of one input. Nearly all take milliseconds; the check is for what never ends, not for what is slow."""
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


class Hang(BaseException):
    """An input took longer than it may. No ``except Exception`` holds it up."""


@contextmanager
def refusal_of(*sources: object) -> Iterator[None]:
    """Let a UserError pass, if it is a sentence.

    Args:
        sources: one of which it names: a file, a folder, a key.
    """
    try:
        yield
    except UserError as error:
        said = printable(str(error))
        assert any(printable(str(source)) in said for source in sources), f"{said!r} names none of {sources}"
        assert " " in said and said[:2].strip(), f"{said!r} is not a sentence"


@contextmanager
def limited(seconds: float = SECONDS) -> Iterator[None]:
    """Raise Hang in what takes more CPU time, or waits ``WAITING`` times as long."""

    def ring(*_: object) -> None:
        raise Hang(f"not done within {seconds:g} s of CPU time")

    before = signal.signal(signal.SIGALRM, ring), signal.signal(signal.SIGPROF, ring)
    left, _ = signal.setitimer(signal.ITIMER_REAL, WAITING * seconds)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before[0])
        signal.signal(signal.SIGPROF, before[1])
        signal.setitimer(signal.ITIMER_REAL, left)  # of whoever limits the time of this process


class Crashed(AssertionError):
    """A command ended with an internal error, whose traceback this is."""

    def __init__(self, traceback: str) -> None:
        super().__init__(traceback)
        own = re.findall(r'File ".*/megatron_fleet/(.*)", line (\d+), in (.*)', traceback) or [("?", "", "")]
        self.kind = "{} at {}:{} {}".format(traceback.strip().splitlines()[-1].partition(":")[0], *own[-1])


@dataclass(frozen=True)
class Done:
    """Output of a command on the terminal."""

    status: int
    out: str
    err: str


def check_shown(text: str) -> None:
    """Nothing of a text does something to a terminal, or stops it."""
    found = _CONTROL.search(text)
    assert not found, f"{found[0]!r} reaches the terminal: {text[-500:]!r}"
    text.encode()


def command(*arguments: object, allowed: tuple[int, ...] = (0, 2)) -> Done:
    """Run ``mfleet`` in this process, with streams as strict as a terminal's.

    What is refused is told in one line; nothing that a file or an argument says reaches the terminal as a control
    character.
    """
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2))
    with redirect_stdout(out), redirect_stderr(err):
        try:
            status = cli.main([str(a) for a in arguments])
        except SystemExit as ended:  # argparse refuses so
            status = ended.code if isinstance(ended.code, int) else 1
        finally:
            gc.enable()  # as conversions leave it
    done = Done(status, *(stream.buffer.getvalue().decode() for stream in (out, err)))
    if saved := re.search(r"\(traceback in (.*)\)$", done.err.strip()):
        text = Path(saved[1]).read_text(encoding="utf-8")
        Path(saved[1]).unlink()
        if status != 2:  # which is a path that cannot be used: the sentence is enough for the user
            raise Crashed(text)
    assert status in allowed, f"status {status}: {done.err[-1000:]}"
    assert "Traceback" not in done.err, done.err
    check_shown(done.out + done.err)
    if status == 2:
        last = done.err.strip().splitlines()[-1:] or done.out.strip().splitlines()[-1:]
        assert last and len(last[0]) > 8, done
    return done

"""This process and its children: killed ones, stack traces of hanging ones, their priority, file modes and imports."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

log = logging.getLogger(__name__)

ONLY_OWNER = 0o077
"""File mode creation mask that leaves nothing to the group and to others."""
_SIGNAL = signal.SIGUSR2
_INTERVAL_S = 0.1
_REAP_S = 1.0
"""A child's pipes close before its exit status is available."""


_SPY_S = 10.0
"""py-spy takes a fraction of a second, but not to pause a process that does not come back from the kernel."""
_WRITE_S = 5.0
_MOST_BYTES = 1 << 20
_OF_RAY = ("/ray/dashboard/", "/ray/_private/", "/ray/autoscaler/", "ray::IDLE", "ray::Dashboard", "ray::RuntimeEnv")


class ChildKilled(Exception):
    """A child process was ended by a signal."""


@contextmanager
def killed_children_raise() -> Iterator[None]:
    """Replace an exception of the body by ChildKilled when SIGKILL ended a `multiprocessing` child of this process,
    e.g. when the kernel ran out of memory. The child must have lived in the body for at least `_INTERVAL_S`.
    """
    import multiprocessing  # takes longer to import than all else here

    seen: set[BaseProcess] = set()
    over = threading.Event()

    def look() -> None:
        while not over.wait(_INTERVAL_S):
            seen.update(multiprocessing.active_children())

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield
    except Exception as error:
        over.set()
        thread.join()
        for child in seen:
            child.join(_REAP_S)
            if child.exitcode == -signal.SIGKILL:
                raise ChildKilled(f"{child.name} (pid {child.pid}) was killed") from error
        raise
    finally:
        over.set()


def write_stacks_on_signal() -> None:
    """Write the stacks of all threads of this process to stderr whenever it receives ``_SIGNAL``."""
    faulthandler.register(_SIGNAL)


@contextmanager
def stacks_written_after(limit_s: float) -> Iterator[None]:
    """Write the stacks of this process, and of the children that called `write_stacks_on_signal`, when the body takes
    longer than ``limit_s`` seconds.
    """
    timer = threading.Timer(limit_s, _write_all_stacks)  # faulthandler's timer does not hold the GIL and may crash
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _write_all_stacks() -> None:
    import psutil  # not in the episode environment

    faulthandler.dump_traceback()
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(OSError):
            if _catches(child.pid):  # the signal would kill the others
                os.kill(child.pid, _SIGNAL)


def _catches(pid: int) -> bool:
    return bool(int(_status(pid)["SigCgt"], 16) & 1 << _SIGNAL - 1)


def _status(pid: int) -> dict[str, str]:
    """Return what the kernel says of a process. Raises OSError when it has ended."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def run_processes(others: Iterable[int] = ()) -> list[int]:
    """Return the pids of this process, and of all Python processes below it and among ``others``, without Ray's own."""
    import psutil

    found = [os.getpid()]
    children = [child.pid for child in psutil.Process().children(recursive=True)]
    for pid in dict.fromkeys([*children, *others]):
        with contextlib.suppress(psutil.Error, OSError):
            python = os.path.basename(os.readlink(f"/proc/{pid}/exe")).startswith("python")
            if python and not any(part in word for word in psutil.Process(pid).cmdline() for part in _OF_RAY):
                found.append(pid)
    return found


def stacks(pids: Sequence[int], py_spy: Path | None = None) -> str:
    """Return the stacks of all threads of some processes of this host as text, with a reason where there are none.

    They come from py-spy, which reads them from outside, however a process hangs; where the system forbids that (a
    container without CAP_SYS_PTRACE), from the processes that called `write_stacks_on_signal`.

    Args:
        py_spy: the program; ``None``: the one beside this interpreter.
    """
    program = Path(sys.prefix, "bin", "py-spy") if py_spy is None else py_spy
    return "\n".join(f"== {_title(pid)}\n{_stacks_of(pid, program)}" for pid in pids)


def _stacks_of(pid: int, py_spy: Path) -> str:
    # A process that is stopped, or in the kernel, cannot be paused; that py-spy reads it unpaused is the exception.
    for more in ((), ("--nonblocking",)):
        found, reason = _spied(pid, py_spy, more)
        if found:
            return found
    try:
        if pid == os.getpid():
            with tempfile.TemporaryFile() as file:
                faulthandler.dump_traceback(file)
                file.seek(0)
                return file.read().decode(errors="replace")
        if _status(pid)["State"].startswith("T"):
            return f"no stacks: {reason}; the process itself is stopped\n"
        if _catches(pid):
            return _written_by(pid)
    except OSError as error:  # expected: it has ended
        return f"no stacks: {error.strerror}\n"
    return f"no stacks: {reason}; the process does not write its own\n"


def _spied(pid: int, py_spy: Path, more: Sequence[str]) -> tuple[str, str]:
    """Return what py-spy reads, or nothing and the reason."""
    environment = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
    command = [str(py_spy), "dump", "--pid", str(pid), *more]
    try:
        done = subprocess.run(command, capture_output=True, env=environment, timeout=_SPY_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", f"py-spy: {error}"
    if done.returncode == 0:
        _command, python, found = done.stdout.decode(errors="replace").partition("\nPython v")
        return python.strip() + found, ""
    lines = done.stderr.decode(errors="replace").strip().splitlines()
    return "", f"py-spy: {lines[0] if lines else f'status {done.returncode}'}"


def _written_by(pid: int) -> str:
    """Make a process write its stacks, and return what is then added to the file that is its stderr."""
    log = Path(os.readlink(f"/proc/{pid}/fd/2"))
    if not log.is_file():
        os.kill(pid, _SIGNAL)
        return "it writes its stacks to its stderr, which is not a file\n"
    start = size = log.stat().st_size
    os.kill(pid, _SIGNAL)
    deadline = time.monotonic() + _WRITE_S
    while time.monotonic() < deadline:
        time.sleep(_INTERVAL_S)
        before, size = size, log.stat().st_size
        if size > start and size == before:
            break
    with log.open("rb") as file:
        file.seek(start)
        return file.read(_MOST_BYTES).decode(errors="replace") or f"no stacks within {_WRITE_S:g} s\n"


def _title(pid: int) -> str:
    """Name a process by its own name, its state and the file that its output goes to."""
    try:
        status, log = _status(pid), os.path.basename(os.readlink(f"/proc/{pid}/fd/2"))
        return f"pid {pid}, {status['Name']}, {status['State']}, {log}"
    except OSError:
        return f"pid {pid}"


@contextmanager
def imports_uncollected() -> Iterator[None]:
    """Disable garbage collection while the body imports large libraries, and exclude their objects from later ones.

    Megatron-Core and vLLM create about a million objects each. Python's collector would traverse them repeatedly during
    the imports, which takes a fifth to a third of their time, and again in every later full collection.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        atexit.register(gc.unfreeze)  # nanobind prints objects that remain at exit as leaks
        if was_enabled:
            gc.enable()


def leave(status: int) -> NoReturn:
    """End this process like `sys.exit`, but without freeing its objects, which takes seconds after large imports.

    As with `sys.exit`, threads that are not daemons end first, and then the functions registered with `atexit` run.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


@contextmanager
def children_import_uncollected() -> Iterator[None]:
    """Within, processes that `multiprocessing` spawns start with garbage collection disabled; they must enable it.

    Python has neither a command-line option nor an environment variable for this, so the child's command is changed.
    """
    from multiprocessing import spawn

    original = spawn.get_command_line

    def command_line(**arguments: Any) -> list[Any]:
        words = original(**arguments)
        code = words.index("-c") + 1
        return [*words[:code], f"import gc; gc.disable(); {words[code]}", *words[code + 1 :]]

    spawn.get_command_line = command_line
    try:
        yield
    finally:
        spawn.get_command_line = original


def take_normal_priority() -> None:
    """Run at nice 0 where this process has a lower priority, or warn when that is not permitted.

    Ray starts actors at nice 15 unless RAY_worker_niceness is set; a cluster that existed before the run was started
    with its owner's settings. On busy cores a process at nice 15 hardly runs at all.
    """
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    if nice <= 0:
        return
    try:
        os.setpriority(os.PRIO_PROCESS, 0, 0)
    except PermissionError:
        log.warning(
            "this process runs at nice %d and may not change that, so on busy cores it waits for all others; start the "
            "Ray cluster with RAY_worker_niceness=0.",
            nice,
        )


@contextmanager
def private_files(out: Path, shared: bool) -> Iterator[None]:
    """Within, this process and the processes that it starts create folders with mode 0700 and files with 0600.

    Args:
        out: folder of the run's outputs; those above it are made before, with the user's own mask.
        shared: change nothing; the user's own mask decides.
    """
    if shared:
        yield
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    before = os.umask(ONLY_OWNER)
    try:
        yield
    finally:
        os.umask(before)

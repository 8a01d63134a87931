"""Probes of this host without its devices: memory, limits of processes, shared memory, disk, compiler."""

from __future__ import annotations

import os
import resource
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from megatron_fleet.cluster.joined_nodes import OBJECT_STORE_BYTES
from megatron_fleet.config.errors import UserError
from megatron_fleet.config.files import read_object
from megatron_fleet.config.secrets import without_secrets
from megatron_fleet.doctor.model import elements, engine_bytes
from megatron_fleet.doctor.probe import Probe, ProbeContext, Result, output, split_advice, with_devices
from megatron_fleet.planning.memory.phases import run_memory
from megatron_fleet.platform.allocator import check_allocator
from megatron_fleet.storage.folder import PART, aligned_buffer
from megatron_fleet.storage.local import LocalFolder, os_errors_as_user_error

GIB = 1 << 30
PROC, CGROUP, SHARED = Path("/proc"), Path("/sys/fs/cgroup"), Path("/dev/shm")
LEAST_MEMORY = 4 * GIB
"""Bytes of free memory that the quickstart needs."""
LEAST_TASKS = 1000
"""Threads and processes: Ray's, those of an engine and of a rank have about a hundred each, and grow with the cores."""
LEAST_FILES, FILES_PER_EPISODE = 4096, 4
"""Open files of a process: Ray's own, and connections of an episode to environment and engine at both ends."""
NCCL_SHARED = GIB
"""NCCL's buffers of eight ranks in shared memory, where they do not reach each other otherwise."""
OUTPUTS = GIB
"""Logs, trajectories and metrics of a run, besides its checkpoints."""
CHECKPOINT_BYTES = 16
"""Bytes of a checkpoint per parameter, at most: master weight, two moments and the model's own weight in float32."""
TRIAL_PARTS = 4
SLOW, TOO_SLOW = 200e6, 20e6
"""Bytes per second of a disk below which a checkpoint holds a run up, and below which it takes hours."""
PYTHON_H = Path(sysconfig.get_path("include")) / "Python.h"
_TRACER = """\
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
PIDFD_OPEN, PIDFD_GETFD = 434, 438
target = libc.syscall(PIDFD_OPEN, int(sys.argv[1]), 0)
if target < 0 or libc.syscall(PIDFD_GETFD, target, 0, 0) < 0:
    sys.exit(os.strerror(ctypes.get_errno()))
"""
"""Takes over a file of another process, as torch and CUDA do to share memory, and as debuggers may."""


def memory(here: ProbeContext) -> Result:
    """Compare the memory that is free for this process with what the run takes on one host."""
    installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    meminfo = dict(line.split(":", 1) for line in (PROC / "meminfo").read_text().splitlines())
    free = int(meminfo["MemAvailable"].split()[0]) << 10
    limit = _memory_of_cgroup()
    if limit is not None:
        free = min(free, limit[1])
    needed = _needed_memory(here)
    limited = f", control group {_gib(limit[0])}" if limit is not None and limit[0] < installed else ""
    seen = f"{_gib(free)} free of {_gib(installed)}{limited}; the run needs about {_gib(needed)}"
    if free < needed:
        fix = "end what else takes memory here" if limited == "" else "raise the memory limit of the container or job"
        return Result("failed", seen, f"{fix}, or use more hosts")
    return Result("ok", seen)


def _needed_memory(here: ProbeContext) -> int:
    if here.config is None or not here.host.devices:
        return LEAST_MEMORY
    file = Path(here.config.model.folder, "config.json")
    if not file.is_file():  # the probe of the model's files says so
        return LEAST_MEMORY
    smallest = min(device.memory_bytes for device in here.host.devices)
    return sum(run_memory(here.config, read_object(file, "fetch the model again"), smallest).host.values())


def control_group(here: ProbeContext) -> Result:
    """Compare the number of threads and of cores that the control group leaves with what a run takes."""
    cores = os.cpu_count() or 1
    left, limit = _tasks_left()
    quota = _cpus_of_cgroup()
    seen = f"{'unlimited' if left is None else f'{left} of {limit}'} processes and threads"
    seen += f", {cores} cores" if quota is None or quota >= cores else f", CPU time of {quota:g} of {cores} cores"
    if left is not None and left < LEAST_TASKS:
        fix = f"raise pids.max of the container or job, and ulimit -u, by {LEAST_TASKS} or more"
        return Result("failed", seen, fix)
    if quota is not None and quota < 1:
        return Result("failed", seen, "give the container or job at least one core")
    if quota is not None and quota < cores:
        return Result("warning", seen, "programs start a thread for each core; set OMP_NUM_THREADS, or raise the quota")
    return Result("ok", seen)


def _memory_of_cgroup() -> tuple[int, int] | None:
    """Return the lowest limit in bytes, and what is free below the tightest one; ``None`` without a limit."""
    found = []
    for folder in _cgroups("memory"):
        v2 = (folder / "memory.max").is_file()
        limit = _number(folder / ("memory.max" if v2 else "memory.limit_in_bytes"))
        used = _number(folder / ("memory.current" if v2 else "memory.usage_in_bytes"))
        if limit is not None and used is not None and limit < 1 << 60:  # v1 writes a huge number for none
            found.append((limit, limit - used + _reclaimable(folder / "memory.stat")))
    return (min(limit for limit, _ in found), max(0, min(free for _, free in found))) if found else None


def _reclaimable(stat: Path) -> int:
    """Bytes of files in memory that the kernel drops when it needs room; they count as used."""
    values = dict(line.split() for line in stat.read_text().splitlines()) if stat.is_file() else {}
    return int(values.get("total_inactive_file", values.get("inactive_file", 0)))


def _tasks_left() -> tuple[int | None, int]:
    """Return how many more threads may start and the limit that says so; ``None``: any number."""
    found = []
    for folder in _cgroups("pids"):
        limit, used = _number(folder / "pids.max"), _number(folder / "pids.current")
        if limit is not None and used is not None:
            found.append((limit - used, limit))
    soft = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    if soft != resource.RLIM_INFINITY and os.geteuid() != 0:
        found.append((soft - _tasks_of_user(), soft))
    return min(found, default=(None, 0))


def _tasks_of_user() -> int:
    count = 0
    for folder in PROC.glob("[0-9]*"):
        try:
            if folder.stat().st_uid == os.getuid():
                count += len(os.listdir(folder / "task"))
        except OSError:  # it has ended meanwhile
            continue
    return count


def _cpus_of_cgroup() -> float | None:
    found = []
    for folder in _cgroups("cpu"):
        if (folder / "cpu.max").is_file():
            quota, period = (folder / "cpu.max").read_text().split()
        elif (folder / "cpu.cfs_quota_us").is_file():
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
        else:
            continue
        if quota not in ("max", "-1"):
            found.append(int(quota) / int(period))
    return min(found, default=None)


def _cgroups(controller: str) -> Iterator[Path]:
    """Yield the folders of this process's control groups with a controller, of versions 1 and 2, and all above."""
    for line in (PROC / "self" / "cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = CGROUP / controller if controllers else CGROUP
        folder = top / path.strip("/")
        for candidate in (folder, *folder.parents):
            if candidate.is_relative_to(top) and candidate.is_dir():
                yield candidate


def _number(file: Path) -> int | None:
    text = file.read_text().strip() if file.is_file() else ""
    return int(text) if text.isdigit() else None


def shared_memory(here: ProbeContext) -> Result:
    """Compare the free room in /dev/shm with Ray's object store and the weights that are synced through it."""
    disk = os.statvfs(SHARED)
    free = disk.f_bavail * disk.f_frsize
    needed = OBJECT_STORE_BYTES + (NCCL_SHARED if here.host.devices else 0)
    transport = "auto" if here.config is None else here.config.rollout.engine.transport
    if here.config is not None and (transport == "shm" or (transport == "auto" and not here.host.devices)):
        needed += engine_bytes(here.config.model) or 0
    seen = f"{_mib(free)} free in {SHARED}; the run needs {_mib(needed)}"
    if free >= needed:
        return Result("ok", seen)
    return Result("failed", seen, "give the container --ipc host or a larger --shm-size, or mount -o remount,size=… it")


def open_files(here: ProbeContext) -> Result:
    """Compare the limit of open files of a process with the connections of the episodes in flight."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    episodes = 0 if here.config is None else here.config.episodes
    needed = LEAST_FILES + FILES_PER_EPISODE * episodes
    seen = f"{soft} in a process (at most {hard}); the run needs {needed}"
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return Result("ok", seen)
    if hard == resource.RLIM_INFINITY or hard >= needed:
        return Result("failed", seen, f"run `ulimit -n {needed}` before the command")
    return Result(
        "failed", seen, "raise nofile in /etc/security/limits.conf, or start the container with --ulimit nofile=…"
    )


def tracing(here: ProbeContext) -> Result:
    """Take over a file of another process of this user: what sharing of expandable CUDA memory and py-spy need."""
    if here.host.devices:
        check_allocator(here.environ)
    scope = PROC / "sys" / "kernel" / "yama" / "ptrace_scope"
    seen = f"ptrace_scope {scope.read_text().strip()}" if scope.is_file() else "no ptrace_scope in this kernel"
    target = _Sleeper()
    try:
        output([sys.executable, "-IS", "-c", _TRACER, str(target.pid)], without_secrets(here.environ), 10)
    except UserError as error:
        fix = (
            "set kernel.yama.ptrace_scope to 0, or give the container --cap-add SYS_PTRACE, to see stacks of hung runs"
        )
        return Result("warning", f"{seen}; processes cannot look into each other ({str(error).rstrip('.')})", fix)
    finally:
        target.end()
    return Result("ok", f"{seen}; processes of a user can look into each other")


class _Sleeper:
    """A child process that does nothing, with a file open as its descriptor 0."""

    def __init__(self) -> None:
        self._read, write = os.pipe()
        self.pid = os.posix_spawn(
            "/bin/sleep", ["sleep", "60"], {}, file_actions=[(os.POSIX_SPAWN_DUP2, self._read, 0)]
        )
        os.close(write)

    def end(self) -> None:
        os.kill(self.pid, 9)
        os.waitpid(self.pid, 0)
        os.close(self._read)


def disk_space(here: ProbeContext) -> Result:
    """Compare the free room for the run's outputs with the checkpoints that it keeps."""
    folder = here.folder
    if not os.access(folder, os.W_OK | os.X_OK):
        return Result("failed", f"{folder} cannot be written to", "choose another run.out with --out")
    disk = os.statvfs(folder)
    free = disk.f_bavail * disk.f_frsize
    needed = OUTPUTS
    if here.config is not None and not here.config.policy.lora.rank:
        needed += CHECKPOINT_BYTES * (elements(here.config.model.folder) or 0) * (here.config.checkpoint.keep + 1)
    seen = f"{_gib(free)} free at {folder}; the run needs {_gib(needed)}"
    if free < needed:
        return Result("failed", seen, "free some space, choose another run.out, or lower checkpoint.keep")
    if disk.f_files and disk.f_favail < 10_000:
        return Result("failed", f"{seen}, but only {disk.f_favail} more files fit", "remove files that nobody needs")
    return Result("ok", seen)


def disk_speed(here: ProbeContext) -> Result:
    """Write and read a file as checkpoints are, past the page cache."""
    size = TRIAL_PARTS * PART
    if not os.access(here.folder, os.W_OK | os.X_OK):
        return Result("skipped", f"{here.folder} cannot be written to")
    with (
        os_errors_as_user_error(here.folder, "written", size),
        tempfile.TemporaryDirectory(prefix=".mfleet-doctor-", dir=here.folder) as name,
    ):
        folder, buffer = LocalFolder(Path(name)), aligned_buffer(PART)
        buffer[:] = os.urandom(1 << 16) * (PART >> 16)
        begun = time.perf_counter()
        writer = folder.create("trial", size)
        try:
            for part in range(TRIAL_PARTS):
                writer.write_at(part * PART, buffer)
            writer.commit()
        finally:
            writer.abort()
        written = size / (time.perf_counter() - begun)
        begun = time.perf_counter()
        for part in range(TRIAL_PARTS):
            folder.read_into("trial", part * PART, buffer)
        read = size / (time.perf_counter() - begun)
    seen = f"{written / 1e6:.0f} MB/s written, {read / 1e6:.0f} MB/s read at {here.folder}"
    if here.config is not None and (parameters := elements(here.config.model.folder)):
        seen += f"; a checkpoint takes {CHECKPOINT_BYTES * parameters / written:.0f} s"
    if written < TOO_SLOW:
        return Result("failed", seen, "choose a run.out on a faster disk, and checkpoint.store.url for the slow one")
    if written < SLOW and here.host.devices:
        return Result("warning", seen, "put run.out on a local NVMe disk")
    return Result("ok", seen)


def compiler(here: ProbeContext) -> Result:
    """Compile a module for Python in C, as Triton does for each kernel."""
    if not PYTHON_H.is_file():
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        return Result("failed", f"{PYTHON_H} is missing", f"install python{version}-dev")
    with tempfile.TemporaryDirectory() as name:
        source = Path(name, "launcher.c")
        source.write_text("#include <Python.h>\nint one(void) { return PY_MAJOR_VERSION; }\n")
        command: list[str | Path] = [
            "cc",
            "-shared",
            "-fPIC",
            f"-I{PYTHON_H.parent}",
            source,
            "-o",
            Path(name, "launcher.so"),
        ]
        environ = without_secrets(here.environ)
        try:
            output(command, environ, 15)
            version = output(["cc", "--version"], environ, 15).splitlines()[0]
        except UserError as error:
            return Result("failed", split_advice(str(error))[0], "install g++, and have cc in PATH")
    return Result("ok", version)


def _gib(nbytes: int) -> str:
    return f"{nbytes / GIB:.1f} GiB"


def _mib(nbytes: int) -> str:
    return f"{nbytes / (1 << 20):.0f} MiB"


PROBES = (
    Probe("memory", memory),
    Probe("control group", control_group),
    Probe("shared memory", shared_memory),
    Probe("open files", open_files),
    Probe("tracing", tracing),
    Probe("disk space", disk_space),
    Probe("disk speed", disk_speed, deadline_s=60.0),
    Probe("compiler", compiler, with_devices, "runs on GPUs"),
)

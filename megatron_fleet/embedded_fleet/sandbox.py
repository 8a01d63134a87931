"""Sandbox of a verifier, which leaves it memory, CPU time and the pipe for its verdict. Standard library only.

Layers, each sufficient against most attacks:

| layer        | removes                                                                | missing                 |
|--------------|------------------------------------------------------------------------|-------------------------|
| system calls | all but memory, clocks, reading and writing of open files (seccomp)    | nowhere, or it refuses  |
| namespaces   | other processes, users, networks, mounts, shared memory; an empty root | containers without them |
| Landlock     | every path, TCP, abstract sockets, signals to others                   | Linux before 5.13       |
| limits       | CPU time, memory, processes, new files                                 | nowhere                 |

`enter` confines the process whose children run verifiers, `fork` creates such a child, `confine` confines it.
Every call is irreversible and inherited. The filter is an allow-list: system calls of later kernels are refused. As a
script this prints the layers that the machine lacks, as JSON.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import json
import os
import platform
import random
import resource
import signal
import struct
from pathlib import Path

NOBODY = 65534
LIBC = ctypes.CDLL(None, use_errno=True)
LIBC_WITH_GIL = ctypes.PyDLL(None, use_errno=True)

# linux/prctl.h, sched.h, mount.h, seccomp.h, filter.h, audit.h, landlock.h
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_GET_SECCOMP, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 4, 21, 22, 38
CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x02000000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REC, MS_PRIVATE, MNT_DETACH = 1, 2, 4, 8, 0x4000, 0x40000, 2
SECCOMP_MODE_FILTER, ALLOW, REFUSE, KILL = 2, 0x7FFF0000, 0x00050000 | errno.EPERM, 0x80000000
LOAD_WORD, JUMP_EQUAL, RETURN = 0x20, 0x15, 0x06
CAPABILITY_VERSION = 0x20080522
LANDLOCK_CREATE_RULESET, LANDLOCK_RESTRICT_SELF = 444, 446
LANDLOCK_CREATE_RULESET_VERSION = 1
LANDLOCK_FS = {1: 13, 2: 14, 3: 15, 5: 16}
"""File access rights by the Landlock version that introduced them, as the number of low bits."""
Machine = tuple[int, int, int, int, dict[str, int]]
MACHINES: dict[str, Machine] = {
    # AUDIT_ARCH_*, clone, capset, pivot_root, and the system calls that a verifier may use.
    "x86_64": (0xC000003E, 56, 126, 155, {
        "read": 0, "write": 1, "close": 3, "fstat": 5, "lseek": 8, "mmap": 9, "mprotect": 10, "munmap": 11, "brk": 12,
        "rt_sigaction": 13, "rt_sigprocmask": 14, "rt_sigreturn": 15, "sched_yield": 24, "mremap": 25, "madvise": 28,
        "nanosleep": 35, "getpid": 39, "exit": 60, "gettimeofday": 96, "getrusage": 98, "times": 100, "getuid": 102,
        "getgid": 104, "geteuid": 107, "getegid": 108, "getppid": 110, "sigaltstack": 131, "gettid": 186, "time": 201,
        "futex": 202, "sched_getaffinity": 204, "restart_syscall": 219, "clock_gettime": 228, "clock_getres": 229,
        "clock_nanosleep": 230, "exit_group": 231, "getrandom": 318, "rseq": 334,
    }),
    "aarch64": (0xC00000B7, 220, 91, 41, {
        "read": 63, "write": 64, "close": 57, "fstat": 80, "lseek": 62, "mmap": 222, "mprotect": 226, "munmap": 215,
        "brk": 214, "rt_sigaction": 134, "rt_sigprocmask": 135, "rt_sigreturn": 139, "sched_yield": 124, "mremap": 216,
        "madvise": 233, "nanosleep": 101, "getpid": 172, "exit": 93, "gettimeofday": 169, "getrusage": 165,
        "times": 153, "getuid": 174, "getgid": 176, "geteuid": 175, "getegid": 177, "getppid": 173, "sigaltstack": 132,
        "gettid": 178, "futex": 98, "sched_getaffinity": 123, "restart_syscall": 128, "clock_gettime": 113,
        "clock_getres": 114, "clock_nanosleep": 115, "exit_group": 94, "getrandom": 278, "rseq": 293,
    }),
}  # fmt: skip


class Missing(Exception):
    """This machine lacks a layer; the message gives the reason."""


def enter() -> dict[str, str]:
    """Confine this process and its later children to an empty root without network, as nobody instead of root.

    Everything needed from files must be loaded before.

    Returns:
        The layers that the machine lacks, with the reason. If "system calls" is among them, `confine` raises.
    """
    missing = {}
    _prctl(PR_SET_NO_NEW_PRIVS, 1)
    if reason := _without_filter():
        missing["system calls"] = reason
    if os.getuid() == 0:
        try:
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
        except OSError as error:  # root of a container without the right to, or without other users
            missing["user"] = f"nobody instead of root: {error}"
    for name, layer in (("namespaces", _enter_namespaces), ("landlock", _enter_landlock)):
        try:
            layer()
        except (OSError, Missing) as error:
            missing[name] = str(error)
    return missing


def fork(namespaces: bool) -> int:
    """Fork a process with one thread; with ``namespaces`` the child is the first process of new PID and IPC namespaces.

    Raises OSError.
    """
    if not namespaces:
        return os.fork()
    # A process cannot leave the PID namespace it created for its children, so `unshare` would cost an extra process.
    flags = signal.SIGCHLD | CLONE_NEWPID | CLONE_NEWIPC
    pid: int = LIBC_WITH_GIL.syscall(_machine()[1], flags, None, None, None, None)
    _checked(pid, "clone")
    if pid == 0:
        random.seed()  # the only step of Python's own fork that matters with one thread
    return pid


def confine(cpu_s: int, memory_bytes: int) -> None:
    """Restrict this process to memory, CPU time and its open files. Raises Missing without the system call filter."""
    for kind, value in (
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_NOFILE, 0),  # no new descriptor of any kind
    ):
        resource.setrlimit(kind, (value, value))
    _drop_capabilities(_machine()[2])
    _filter_system_calls()


def die_with_parent(parent_pid: int | None) -> None:
    """Request SIGKILL from the kernel when the parent ends. ``None``: the parent is not visible to this process."""
    _prctl(PR_SET_PDEATHSIG, 9)
    if parent_pid is not None and os.getppid() != parent_pid:
        os._exit(0)


def _enter_namespaces() -> None:
    user, group = os.getuid(), os.getgid()
    _prctl(PR_SET_DUMPABLE, 1)  # cleared by the change of user, and with it access to its own /proc files
    spaces = CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWCGROUP | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWNET
    _checked(LIBC.unshare(spaces), "unshare")
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{NOBODY} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{NOBODY} {group} 1")
    _mount(b"/", None, MS_REC | MS_PRIVATE, None)
    _mount(b"/tmp", b"tmpfs", MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC, b"size=4k,nr_inodes=1,mode=555")
    os.chdir("/tmp")
    pivot_root = _machine()[3]
    _checked(LIBC.syscall(pivot_root, b".", b"."), "pivot_root")
    _checked(LIBC.umount2(b".", MNT_DETACH), "umount2")
    os.chdir("/")
    _prctl(PR_SET_DUMPABLE, 0)


def _enter_landlock() -> None:
    version = LIBC.syscall(LANDLOCK_CREATE_RULESET, None, 0, LANDLOCK_CREATE_RULESET_VERSION)
    if version < 1:
        raise Missing(f"landlock_create_ruleset: {os.strerror(ctypes.get_errno())}")
    files = (1 << max(bits for since, bits in LANDLOCK_FS.items() if since <= version)) - 1
    network, scope = (3 if version >= 4 else 0), (3 if version >= 6 else 0)
    rules = struct.pack("<QQQ", files, network, scope)[: 24 if version >= 6 else 16 if version >= 4 else 8]
    ruleset = LIBC.syscall(LANDLOCK_CREATE_RULESET, rules, len(rules), 0)
    _checked(ruleset, "landlock_create_ruleset")
    _checked(LIBC.syscall(LANDLOCK_RESTRICT_SELF, ruleset, 0), "landlock_restrict_self")
    os.close(ruleset)


def _without_filter() -> str | None:
    """Return why system calls cannot be filtered; ``None``: they can."""
    try:
        _filter()
        _prctl(PR_GET_SECCOMP, 0)
    except (OSError, Missing) as error:
        return str(error)
    return None


def _machine() -> Machine:
    try:
        return MACHINES[platform.machine()]
    except KeyError:
        raise Missing(f"processors of kind {platform.machine()} have no list of system calls here") from None


def _drop_capabilities(capset: int) -> None:
    header, none = struct.pack("<Ii", CAPABILITY_VERSION, 0), bytes(24)
    _checked(LIBC.syscall(capset, header, none), "capset")


def _filter_system_calls() -> None:
    program, length = _filter()
    descriptor = struct.pack("@HP", length, ctypes.addressof(program))
    if LIBC.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, descriptor, 0, 0) != 0:
        raise Missing(f"seccomp: {os.strerror(ctypes.get_errno())}")


@functools.cache
def _filter() -> tuple[ctypes.Array[ctypes.c_char], int]:
    """Build the BPF program; return it with its number of steps.

    seccomp_data: int nr at 0, u32 arch at 4. System calls of other architectures (i386, x32) have other numbers.
    """
    architecture, *_, calls = _machine()
    allowed = sorted(calls.values())
    steps = [
        (LOAD_WORD, 0, 0, 4),
        (JUMP_EQUAL, 1, 0, architecture),
        (RETURN, 0, 0, KILL),
        (LOAD_WORD, 0, 0, 0),
    ]
    steps += [(JUMP_EQUAL, len(allowed) - i, 0, number) for i, number in enumerate(allowed)]
    steps += [(RETURN, 0, 0, REFUSE), (RETURN, 0, 0, ALLOW)]
    return ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *step) for step in steps)), len(steps)


def _mount(target: bytes, kind: bytes | None, flags: int, options: bytes | None) -> None:
    _checked(LIBC.mount(b"none", target, kind, ctypes.c_ulong(flags), options), "mount")


def _prctl(option: int, value: int) -> None:
    _checked(LIBC.prctl(option, value, 0, 0, 0), "prctl")


def _checked(result: int, call: str) -> None:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{call}: {os.strerror(code)}")


if __name__ == "__main__":
    print(json.dumps(enter()))

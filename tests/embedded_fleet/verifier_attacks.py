"""Try to break out of the verifier host; standard library only, so that any user and any Python can run it.

    python verifier_attacks.py HOST_SCRIPT PREY_PID LOOT_FOLDER

Prints JSON: for each attack whether it worked. Its victims are the process PREY_PID and the files in LOOT_FOLDER.
"""

from __future__ import annotations

import json
import os
import socket
import sqlite3
import subprocess
import sys
import tempfile

# By system call, for what the standard library does not offer or checks itself. Numbers of x86_64.
CALLS = {
    "process_vm_readv": "310, PREY, 0, 0, 0, 0, 0",
    "ptrace attach": "101, 16, PREY, 0, 0",
    "kill": "62, PREY, 9",
    "tgkill": "234, PREY, PREY, 9",
    "kill everything": "62, -1, 9",
    "kill the neighbours": "62, 2, 9",
    "pidfd_open": "434, PREY, 0",
    "prlimit": "302, PREY, 7, 0, 0",
    "setpriority": "141, 0, PREY, 20",
    "sched_setaffinity": "203, PREY, 8, 0",
    "shmget": "29, 0, 4096, 0o1777",
    "msgget": "68, 0, 0o1777",
    "semget": "64, 0, 1, 0o1777",
    "mq_open": "240, b'/loot', 0o102, 0o666, 0",
    "memfd_create": "319, b'loot', 0",
    "userfaultfd": "323, 1",
    "io_uring_setup": "425, 8, bytes(120)",
    "bpf": "321, 0, bytes(120), 120",
    "perf_event_open": "298, bytes(120), 0, -1, -1, 0",
    "add_key": "248, b'user', b'loot', b'1', 1, -3",
    "keyctl": "250, 0, -3, 1",
    "unshare": "272, 0x10000000",
    "setns": "308, 0, 0",
    "clone3": "435, bytes(88), 88",
    "mount": "165, b'none', b'/', b'tmpfs', 0, 0",
    "umount": "166, b'/', 2",
    "chroot": "161, b'/'",
    "sethostname": "170, b'x', 1",
    "settimeofday": "164, bytes(16), 0",
    "reboot": "169, 0, 0, 0",
    "syslog": "103, 3, bytes(64), 64",
    "socket": "41, 2, 1, 0",
    "socketpair": "53, 1, 1, 0, bytes(8)",
    "open_by_handle_at": "304, -100, bytes(16), 0",
    "execve": "59, b'/bin/sh', 0, 0",
    "x32 open": "0x40000002, b'/etc/hostname', 0",
    "set no limit on memory": "160, 9, struct.pack('QQ', 2**62, 2**62)",
    "become root": "105, 0",
    "leave the filter": "157, 22, 0, 0",
    "vmsplice": "278, 1, 0, 0, 0",
    "name_to_handle_at": "303, -100, b'/', bytes(64), 0, 0",
    "fanotify_init": "300, 0, 0",
    "inotify_init": "253",
    "quotactl": "179, 0, 0, 0, 0",
    "swapon": "167, b'/', 0",
    "personality": "135, 0x0040000",
}
# What Python offers. PREY and LOOT are replaced.
ACTIONS = {
    "unlink": "os.unlink(LOOT + '/file')",
    "truncate": "os.truncate(LOOT + '/file', 0)",
    "rename": "os.rename(LOOT + '/file', LOOT + '/moved')",
    "chmod": "os.chmod(LOOT + '/file', 0o777)",
    "utime": "os.utime(LOOT + '/file')",
    "stat": "os.stat('/etc/hostname')",
    "listdir": "os.listdir('/')",
    "mkdir": "os.mkdir(LOOT + '/made')",
    "mkdir here": "os.mkdir('made')",
    "mkdir in the temporary folder": "os.mkdir('/tmp/verifier-made')",
    "symlink": "os.symlink('/', LOOT + '/made')",
    "link": "os.link(LOOT + '/file', LOOT + '/made')",
    "mkfifo": "os.mkfifo(LOOT + '/made')",
    "create": "os.close(os.open(LOOT + '/made', os.O_CREAT | os.O_WRONLY))",
    "read": "open(LOOT + '/file').read()",
    "write at a path of sqlite": "__import__('sqlite3').connect(LOOT + '/made.db').execute('create table t (a)')",
    "attach a database": "env.db()._connection.execute(f\"ATTACH '{LOOT}/made.db' AS made\")",
    "fork": "os.fork()",
    "thread": "__import__('_thread').start_new_thread(print, ())",
    "spawn": "os.posix_spawn('/bin/true', ['true'], {})",
    "pipe": "os.pipe()",
    "duplicate": "os.dup(0)",
    "kill": "os.kill(PREY, 9)",
    "kill the parent": "os.kill(os.getppid() or 1, 9)",
    "priority": "os.setpriority(os.PRIO_PROCESS, PREY, 20)",
    "chdir": "os.chdir('/tmp')",
    "setuid": "os.setuid(0)",
    "import from a file": "__import__('xmlrpc.client')",
    "import ctypes": "import ctypes",
    "import ctypes as a builtin": "import _ctypes",
    "import ctypes anew": "sys.modules.pop('ctypes', None), __import__('ctypes.util')",
    "import ctypes by its loader": "from importlib import util; util.find_spec('_ctypes').loader.create_module(None)",
    "environment": "1 / len(os.environ)",
    "open a verifier's pipe again": "open('/proc/self/fd/0')",
}
BY_CALL = """
import struct
frame = sys._getframe()  # it cannot import ctypes, but its callers have it
while not hasattr(frame.f_locals.get('self'), '_sandbox'):
    frame = frame.f_back
ctypes = frame.f_locals['self']._sandbox.ctypes
calls = ctypes.CDLL(None, use_errno=True).syscall
if calls(*[ctypes.c_long(a) if isinstance(a, int) else a for a in ({arguments},)]) < 0:
    raise OSError(ctypes.get_errno(), 'refused')
"""


def verifier(body: str) -> str:
    lines = "\n".join(f"    {line}" for line in ["import os, sys", *body.strip().splitlines(), "return 1"])
    return f"def verify(env):\n{lines}\n"


def main(host_script: str, prey: int, loot: str) -> None:
    bodies = (
        {f"call: {name}": BY_CALL.format(arguments=a) for name, a in CALLS.items()} if os.uname()[4] == "x86_64" else {}
    )
    bodies |= {"a permitted call": BY_CALL.format(arguments="39")} if bodies else {}
    bodies |= ACTIONS
    bodies["an honest verifier"] = "assert env.db('seed').query('SELECT 1 AS one') == [{'one': 1}]"
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{folder}/socket")
        listener.listen()
        limits = {"cpu_s": 2, "wall_s": 120.0, "memory_bytes": 256 * 2**20}
        command = [sys.executable, "-I", host_script, str(listener.fileno()), str(os.getpid()), json.dumps(limits)]
        command.append(json.dumps(["user", "namespaces", "landlock"]))
        host = subprocess.Popen(command, pass_fds=[listener.fileno()], stdin=subprocess.DEVNULL, cwd=folder, env={})
        try:
            found = {}
            for name, body in bodies.items():
                code = verifier(body.replace("PREY", str(prey)).replace("LOOT", repr(loot)))
                found[name] = ask(f"{folder}/socket", code)
            left = [entry for entry in os.listdir(folder) if entry != "socket"]
            print(json.dumps({"verdicts": found, "left": left}))
        finally:
            host.kill()
            host.wait()


def ask(path: str, code: str) -> list:
    with sqlite3.connect(":memory:") as database:
        database.execute("CREATE TABLE one (a)")
        content = database.serialize()
    sizes = {"seed_bytes": len(content), "current_bytes": len(content)}
    head = {"code": code, "final_answer": None, "conversation": None} | sizes
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(300)
        connection.connect(path)
        connection.sendall(json.dumps(head).encode() + b"\n" + content * 2)
        reply = json.loads(connection.makefile().readline())
    return [reply["value"], reply["reason"]]


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])

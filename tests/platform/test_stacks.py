"""A process that hangs writes where, together with its children; children that cannot are left alone."""

from __future__ import annotations

import subprocess
import sys

from waiting import HANG_S, wait_until

SCRIPT = """
import subprocess, sys, time
from megatron_fleet.platform import stacks

def child_hangs():
    stacks.write_on_signal()
    print("ready", flush=True)
    time.sleep(3600)

def parent_hangs():
    sys.stdin.readline()

if sys.argv[1:] == ["child"]:
    child_hangs()
able = subprocess.Popen([sys.executable, __file__, "child"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
unable = subprocess.Popen(["sleep", "3600"], stdin=subprocess.DEVNULL)
able.stdout.readline()
with stacks.written_after(3600):
    pass
with stacks.written_after(0.01):
    parent_hangs()
print([child.poll() for child in (able, unable)])
able.kill(), unable.kill()
"""


def test_stacks_of_a_process_and_of_its_children(tmp_path):
    script, told = tmp_path / "script.py", tmp_path / "told"
    script.write_text(SCRIPT)
    with told.open("w") as errors:
        run = subprocess.Popen(
            [sys.executable, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
        )
    # It hangs until both are there.
    wait_until(
        lambda: all(name in told.read_text() for name in ("in parent_hangs", "in child_hangs")),
        lambda: run.poll() is None,
    )
    out, _ = run.communicate("\n", timeout=HANG_S)
    assert run.returncode == 0 and out == "[None, None]\n", told.read_text()
    assert told.read_text().count("in parent_hangs") == told.read_text().count("in child_hangs") == 1

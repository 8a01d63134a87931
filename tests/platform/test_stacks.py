"""A process that hangs writes where, together with its children; children that cannot are left alone."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import subprocess, sys, time
from megatron_fleet.platform import stacks

def child_hangs():
    stacks.write_on_signal()
    print("ready", flush=True)
    time.sleep(60)

def parent_hangs():
    time.sleep(2)

if sys.argv[1:] == ["child"]:
    child_hangs()
able = subprocess.Popen([sys.executable, __file__, "child"], stdout=subprocess.PIPE)
unable = subprocess.Popen(["sleep", "60"])
able.stdout.readline()
with stacks.written_after(60):
    pass
with stacks.written_after(0.5):
    parent_hangs()
print([child.poll() for child in (able, unable)])
able.kill(), unable.kill()
"""


def test_stacks_of_a_process_and_of_its_children(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    ran = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr.count("in parent_hangs") == ran.stderr.count("in child_hangs") == 1
    assert ran.stdout == "[None, None]\n"

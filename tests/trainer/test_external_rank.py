"""`mfleet rank`, started by somebody else: the controller's configuration says who may read its files."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys

import pytest
from waiting import until

from megatron_fleet.trainer.links import RankListener

TOKEN = "the run's token"


@pytest.mark.parametrize("shared", [False, True])
async def test_its_log_is_for_its_user_alone_unless_the_run_is_shared(tmp_path, shared):
    listener = RankListener(TOKEN, json.dumps({"run": {"out": str(tmp_path / "out"), "shared": shared}}), 1)
    await listener.listen("127.0.0.1", 0)
    identity = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    environment = os.environ | identity | {"MFLEET_CONTROLLER": listener.address, "MFLEET_TOKEN": TOKEN}
    command = [sys.executable, "-m", "megatron_fleet.cli", "rank"]
    rank = subprocess.Popen(command, env=environment, umask=0o027)
    log = tmp_path / "out" / "logs" / "rank_0.log"
    try:
        await until(log.exists)
        modes = [stat.S_IMODE(path.stat().st_mode) for path in (log.parent, log)]
        assert modes == ([0o750, 0o640] if shared else [0o700, 0o600])
    finally:
        rank.kill()
        rank.wait()
        listener.close()

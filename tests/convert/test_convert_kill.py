"""Killed at any moment, a conversion is taken up again and ends as if nothing had happened."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("torch")

import numpy as np
from convert_helpers import command, files, mfleet
from tiny_configs import raw_config
from turns import in_turn
from waiting import HANG_S

from megatron_fleet.config.errors import UserError
from megatron_fleet.convert.inspect import inspect
from megatron_fleet.convert.verify import open_side
from megatron_fleet.weights.hf_folder import safetensors_header
from megatron_fleet.weights.mapping import WeightTable

KILLS = int(os.environ.get("MFLEET_TEST_KILLS", "8"))
DIRECTIONS = ("to-megatron", "to-hf")
SEVERAL_FILES = """
import itertools, os, signal, sys, threading, time
from megatron_fleet import cli
from megatron_fleet.storage import local
from megatron_fleet.convert import to_megatron
to_megatron.FILE_BYTES = 4 << 20
local.PART = 1 << 20
kill_at, later_s = map(float, os.environ.get("KILLED", "-2 0").split())
def killed_at(number):
    if number == kill_at:
        threading.Timer(later_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
writes, write_at = itertools.count(), local.LocalWriter.write_at
def slow(*arguments):
    killed_at(next(writes))
    time.sleep(0.01)
    write_at(*arguments)
local.LocalWriter.write_at = slow
killed_at(-1)
status = cli.main(sys.argv[1:])
print("writes:", next(writes))
sys.exit(status)
"""
"""Killed, if at all, so many seconds after so many writes have begun; after -1 it begins itself."""


def write_model(folder, vocab=12_000, width=512, layers=6):
    """A Qwen3 of random bytes, tens of megabytes in files of a few."""
    folder.mkdir()
    config = raw_config("qwen3", "v4") | {
        "vocab_size": vocab,
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": layers,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    tensors = WeightTable(config).tensors
    random_bytes = np.random.default_rng(0)
    groups = [list(tensors)[k::5] for k in range(5)]
    weight_map = {}
    for k, names in enumerate(groups):
        name, at, entries = f"model-{k + 1:05d}-of-00005.safetensors", 0, {}
        for tensor in names:
            size = 2 * int(np.prod(tensors[tensor]))
            span = [at, at + size]
            entries[tensor] = {"dtype": "BF16", "shape": list(tensors[tensor]), "data_offsets": span}
            at += size
            weight_map[tensor] = name
        (folder / name).write_bytes(safetensors_header(entries) + random_bytes.bytes(at))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def not_accepted(place):
    """Neither side of the tools takes what is there for a model or a checkpoint."""
    for look in (inspect, open_side):
        with pytest.raises(UserError):
            look(str(place))


@pytest.fixture(scope="module")
def ends(tmp_path_factory, played) -> Iterator[dict[str, Future[None]]]:
    """Both directions, if both are played, at once: what is killed mostly waits."""
    with ThreadPoolExecutor(len(DIRECTIONS)) as pool:
        yield {way: pool.submit(kill_and_run_again, way, tmp_path_factory.mktemp(way)) for way in played("direction")}


@pytest.mark.slow
@pytest.mark.parametrize("direction", in_turn(DIRECTIONS, of=2))
def test_kill_and_run_again(ends, direction):
    ends[direction].result()


def kill_and_run_again(direction: str, tmp_path: Path) -> None:
    source = write_model(tmp_path / "hf")
    if direction == "to-hf":
        assert mfleet("to-megatron", source, tmp_path / "mg", program=SEVERAL_FILES).returncode == 0
        source = tmp_path / "mg"
    whole = mfleet(direction, source, tmp_path / "whole", program=SEVERAL_FILES)
    assert whole.returncode == 0
    expected, writes = files(tmp_path / "whole"), int(whole.stdout.rpartition("writes:")[2])
    line = command(direction, source, tmp_path / "out", program=SEVERAL_FILES)
    moments = random.Random(direction)
    unfinished = resumed = 0
    out = tmp_path / "out"
    for _ in range(KILLS):
        moment = {"KILLED": f"{moments.randrange(-1, writes)} {moments.uniform(0, 0.02)}"}
        killed = subprocess.run(line, env=os.environ | moment, capture_output=True, timeout=HANG_S)
        assert killed.returncode in (0, -signal.SIGKILL), killed.stderr
        if out.exists():
            assert files(out) == expected
        else:
            unfinished += 1
            partial = tmp_path / ".out.partial"
            resumed += partial.exists() and len(list(partial.rglob("*"))) > 2
            not_accepted(out)
        done = mfleet(direction, source, out, program=SEVERAL_FILES)
        assert done.returncode == 0 and done.stdout.startswith(f"{out}: complete\n"), done.stderr
        assert files(out) == expected
        assert sorted(p.name for p in tmp_path.iterdir() if p.name.startswith(".")) == []
        shutil.rmtree(out)
    # The moments were spread well enough to mean something.
    assert unfinished >= KILLS // 2 and resumed >= KILLS // 5

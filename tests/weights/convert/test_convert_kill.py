"""Killed at any moment, a conversion is taken up again and ends as if nothing had happened."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("torch")

import numpy as np
from convert_helpers import command, files, mfleet
from tiny_configs import raw_config

from megatron_fleet.config.errors import UserError
from megatron_fleet.weights.convert.inspect import inspect
from megatron_fleet.weights.convert.template import safetensors_header
from megatron_fleet.weights.convert.verify import open_side
from megatron_fleet.weights.mapping import WeightTable

KILLS = 50
DIRECTIONS = ("to-megatron", "to-hf")
SEVERAL_FILES = """
import sys, time
from megatron_fleet import cli
from megatron_fleet.storage import local
from megatron_fleet.weights.convert import to_megatron
to_megatron.FILE_BYTES = 4 << 20
# Slow enough that most moments fall between the first byte and the last.
local.PART = 1 << 20
write_at = local.LocalWriter.write_at
def slow(*arguments):
    time.sleep(0.03)
    write_at(*arguments)
local.LocalWriter.write_at = slow
print("begun", file=sys.stderr, flush=True)
sys.exit(cli.main(sys.argv[1:]))
"""


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
def ends(tmp_path_factory) -> Iterator[dict[str, Future[None]]]:
    """Both directions at once: what is killed mostly waits."""
    with ThreadPoolExecutor(len(DIRECTIONS)) as pool:
        yield {way: pool.submit(kill_and_run_again, way, tmp_path_factory.mktemp(way)) for way in DIRECTIONS}


@pytest.mark.slow
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_kill_and_run_again(ends, direction):
    ends[direction].result()


def begin(direction: str, source: Path, out: Path) -> subprocess.Popen[str]:
    """A conversion whose imports are behind it: before their end there is nothing to interrupt."""
    line = command(direction, source, out, program=SEVERAL_FILES)
    process = subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None and process.stderr.readline() == "begun\n"
    return process


def kill_and_run_again(direction: str, tmp_path: Path) -> None:
    source = write_model(tmp_path / "hf")
    if direction == "to-hf":
        assert mfleet("to-megatron", source, tmp_path / "mg", program=SEVERAL_FILES).returncode == 0
        source = tmp_path / "mg"
    process = begin(direction, source, tmp_path / "whole")
    started = time.monotonic()
    process.communicate()
    duration = time.monotonic() - started
    assert process.returncode == 0
    expected = files(tmp_path / "whole")
    moments = random.Random(direction)
    unfinished = resumed = 0
    out = tmp_path / "out"
    for _ in range(KILLS // 2):
        process = begin(direction, source, out)
        time.sleep(moments.uniform(0, duration))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        if out.exists():
            assert files(out) == expected
        else:
            unfinished += 1
            partial = tmp_path / ".out.partial"
            resumed += partial.exists() and len(list(partial.rglob("*"))) > 2
            not_accepted(out)
        done = mfleet(direction, source, out, program=SEVERAL_FILES)
        assert (done.returncode, done.stdout) == (0, f"{out}: complete\n"), done.stderr
        assert files(out) == expected
        assert sorted(p.name for p in tmp_path.iterdir() if p.name.startswith(".")) == []
        shutil.rmtree(out)
    # The moments were spread well enough to mean something.
    assert unfinished > KILLS // 4 and resumed > KILLS // 10

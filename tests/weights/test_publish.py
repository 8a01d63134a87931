"""The shared-memory publisher: contents, protocol, failure and clean-up, over simulated ranks."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

torch = pytest.importorskip("torch")

from weight_fixtures import random_tensors, run_ranks, stage_chunks, tiny_config, write_folder  # noqa: E402

from megatron_fleet.config.errors import UserError  # noqa: E402
from megatron_fleet.weights.communicator import Alone, PeerError  # noqa: E402
from megatron_fleet.weights.load import load_hf  # noqa: E402
from megatron_fleet.weights.publish import ShmPublisher, make_publisher, place  # noqa: E402
from megatron_fleet.weights.source import MegatronWeightSource, ParamMeta, Shard, view_in  # noqa: E402
from megatron_fleet.weights.vllm_shm import checksum  # noqa: E402


class RecordingClient:
    """An engine that maps the buffer and copies out what each update says."""

    def __init__(self, fail: bool = False) -> None:
        self.calls: list[str] = []
        self.fail = fail
        self.tensors: dict[str, torch.Tensor] = {}
        self.version: str | None = None

    def init_weight_transfer_engine(self, init_info):
        self.calls.append("init")
        self.buffer = torch.from_file(init_info["path"], shared=True, size=init_info["nbytes"], dtype=torch.uint8)

    def start_weight_update(self):
        self.calls.append("start")

    def update_weights(self, info):
        self.calls.append("update")
        if self.fail:
            raise RuntimeError("engine died")
        for name, dtype, shape, offset, crc in zip(*info.values(), strict=True):
            tensor = view_in(self.buffer, offset, getattr(torch, dtype), shape)
            assert offset % 256 == 0
            assert checksum(tensor.reshape(-1).view(torch.uint8).numpy()) == crc, name
            self.tensors[name] = tensor.clone()

    def finish_weight_update(self, weight_version=None):
        self.calls.append("finish")
        self.version = weight_version


def start_publisher(folder, config, comm, client, tp, pp, dp=1, dtype=torch.float32):
    """Ranks in Megatron's order: tensor fastest, then data, then pipeline. The model group is simulated per replica."""
    tp_rank, replica, pp_rank = comm.rank % tp, comm.rank // tp % dp, comm.rank // (tp * dp)
    chunks = stage_chunks(config, tp, pp_rank, pp)
    load_hf(chunks, folder, tp_rank=tp_rank, tp_size=tp)
    model = Replica(comm, replica, tp, dp)
    source = MegatronWeightSource(chunks, config, dtype=dtype, shard=Shard(tp_rank, tp, replica, model))
    return source, ShmPublisher(source, client if comm.rank == 0 else None, comm)


class Replica:
    """The ranks of one data-parallel replica, as a part of the world."""

    def __init__(self, world, replica, tp, dp) -> None:
        self._world = world
        self._members = [r for r in range(world.size) if r // tp % dp == replica]
        self.rank, self.size = self._members.index(world.rank), len(self._members)

    def all_gather(self, value):
        values = self._world.all_gather(value)
        return [values[r] for r in self._members]


@pytest.mark.parametrize(("tp", "pp", "dp"), [(1, 1, 1), (2, 2, 1), (2, 1, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_engines_see_every_tensor_of_every_version(tmp_path, tp, pp, dp, dtype):
    config = tiny_config(tie_word_embeddings=pp == 2)
    tensors = random_tensors(config)
    folder = write_folder(tmp_path / "hf", config, tensors)
    client = RecordingClient()

    def body(comm):
        source, publisher = start_publisher(folder, config, comm, client, tp, pp, dp, dtype)
        publisher.publish(1)
        first = dict(client.tensors)
        with torch.no_grad():
            for p in source._parameters.values():
                p.mul_(2)
        publisher.publish(2)
        publisher.close()
        publisher.close()
        return first

    results = run_ranks(tp * pp * dp, body)
    assert not [r for r in results if isinstance(r, Exception)], results
    assert client.calls == ["init", *["start", "update", "finish"] * 2]
    assert client.version == "2"
    assert list(client.tensors) == list(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(results[0][name], tensor.to(dtype)), name
        assert torch.equal(client.tensors[name], (tensor * 2).to(dtype)), name


def test_an_engine_failure_reaches_every_rank(tmp_path):
    config = tiny_config()
    folder = write_folder(tmp_path / "hf", config, random_tensors(config))
    client = RecordingClient(fail=True)

    def body(comm):
        _, publisher = start_publisher(folder, config, comm, client, 2, 1)
        publisher.publish(1)

    first, second = run_ranks(2, body)
    assert "engine died" in str(first)
    assert isinstance(second, PeerError)
    assert "rank 0: engine died" in str(second)
    assert "finish" not in client.calls


def test_publishing_after_close_is_an_error(tmp_path):
    config = tiny_config()
    folder = write_folder(tmp_path / "hf", config, random_tensors(config))
    _, publisher = start_publisher(folder, config, Alone(), RecordingClient(), 1, 1)
    publisher.close()
    with pytest.raises(RuntimeError, match="after close"):
        publisher.publish(1)


def test_no_memory_is_told_before_anything_is_written(monkeypatch, tmp_path):
    config = tiny_config()
    folder = write_folder(tmp_path / "hf", config, random_tensors(config))

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(UserError, match=r"shared memory.*No space left on device.*model.dtype"):
        start_publisher(folder, config, Alone(), RecordingClient(), 1, 1)


OWNER = """
import os, sys, time, torch
sys.path.insert(0, {tests!r})
from test_publish import *
source, publisher = start_publisher({folder!r}, tiny_config(), Alone(), RecordingClient(), 1, 1)
publisher.publish(1)
print(publisher._client.buffer.numel(), f"/proc/{{os.getpid()}}/fd/{{publisher._fd}}", flush=True)
time.sleep(60)
"""


def test_nothing_is_left_when_the_owner_is_killed(tmp_path):
    config = tiny_config()
    folder = write_folder(tmp_path / "hf", config, random_tensors(config))
    before = set(os.listdir("/dev/shm"))
    code = OWNER.format(tests=os.path.dirname(__file__), folder=str(folder))
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        nbytes, path = owner.stdout.readline().split()
        other = torch.from_file(path, shared=True, size=int(nbytes), dtype=torch.uint8)
        assert other.any()
    finally:
        owner.kill()
        owner.wait()
    for _ in range(50):
        if not os.path.exists(path):
            break
        time.sleep(0.1)
    assert not os.path.exists(path)
    assert {n for n in os.listdir("/dev/shm") if "megatron_fleet" in n} <= before
    assert other.any(), "an engine that has the buffer mapped keeps it"


def test_places_are_aligned_and_disjoint():
    metas = [
        ParamMeta("a", torch.float32, (3,)),
        ParamMeta("b", torch.bfloat16, (200,)),
        ParamMeta("c", torch.int8, (1,)),
    ]
    assert place(metas) == ({"a": 0, "b": 256, "c": 768}, 769)


def test_the_device_picks_the_publisher(tmp_path):
    config = tiny_config()
    folder = write_folder(tmp_path / "hf", config, random_tensors(config))
    source, first = start_publisher(folder, config, Alone(), RecordingClient(), 1, 1)
    first.close()
    publisher = make_publisher(source, RecordingClient(), Alone(), torch.device("cpu"))
    assert isinstance(publisher, ShmPublisher)
    publisher.close()

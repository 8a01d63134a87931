"""The shared-memory publisher: contents, protocol, failure and clean-up, over simulated ranks."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

torch = pytest.importorskip("torch")

from weight_fixtures import (  # noqa: E402
    random_tensors,
    run_ranks,
    stage_chunks,
    tiny_config,
    write_folder,
)

from megatron_fleet.config.errors import UserError  # noqa: E402
from megatron_fleet.platform.communicator import Alone, PeerError  # noqa: E402
from megatron_fleet.weight_sync.publish import make_publisher  # noqa: E402
from megatron_fleet.weight_sync.publish_shm import ShmPublisher  # noqa: E402
from megatron_fleet.weight_sync.shared_buffer import (  # noqa: E402
    SUMMED,
    Board,
    RoundLost,
    SharedLayout,
    checksum,
    make_buckets,
    map_memory,
    view_in,
)
from megatron_fleet.weights.load import load_hf  # noqa: E402
from megatron_fleet.weights.source import MegatronWeightSource, ParamMeta, Place  # noqa: E402

pytestmark = pytest.mark.usefixtures("groups")


class RecordingClient:
    """An engine that copies out what each update brings, as far as the checksums agree."""

    def __init__(self, fail: str = "") -> None:
        self.calls: list[str] = []
        self.fail = fail
        self.tensors: dict[str, torch.Tensor] = {}
        self.version: str | None = None

    def init_weight_transfer_engine(self, init_info):
        self._call("init")
        self.layout = SharedLayout.parse(**{k: v for k, v in init_info.items() if k != "path"})
        self.memory = map_memory(init_info["path"], self.layout.nbytes)
        self.board = Board(self.memory, len(self.layout.buckets), self.layout.writers)

    def start_weight_update(self):
        self._call("start")

    def update_weights(self, info):
        self._call("update")
        for bucket, slots in enumerate(self.layout.buckets):
            self.board.wait(SUMMED, bucket, info["round"])
            pieces = [self.layout.piece(bucket, writer) for writer in range(self.layout.writers)]
            assert [p[0] for p in pieces] + [self.layout.spans[bucket][1]] == [
                self.layout.spans[bucket][0],
                *(p[1] for p in pieces),
            ]
            assert [checksum(self.memory[a:b]) for a, b in pieces] == self.board.checksums[bucket].tolist()
            self.tensors |= {s.meta.name: view_in(self.memory, s.offset, s.meta).clone() for s in slots}

    def finish_weight_update(self, weight_version=None):
        self._call("finish")
        self.version = weight_version

    def _call(self, verb):
        self.calls.append(verb)
        if self.fail == verb:
            raise RuntimeError("engine died")


def start_publisher(folder, config, comm, client, tp, pp, dp=1, dtype=torch.float32, wire=None):
    """Ranks in Megatron's order: tensor fastest, then data, then pipeline. The model group is simulated per replica."""
    tp_rank, replica, pp_rank = comm.rank % tp, comm.rank // tp % dp, comm.rank // (tp * dp)
    chunks = stage_chunks(config, (tp_rank, tp), pp_rank, pp)
    load_hf(chunks, folder)
    model = Replica(comm, replica, tp, dp)
    source = MegatronWeightSource(chunks, config, dtype=dtype, place=Place(replica, model))
    return source, ShmPublisher(source, client if comm.rank == 0 else None, comm, wire)


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
            for local in source._local:
                local.view().mul_(2)
        publisher.publish(2)
        publisher.close()
        publisher.close()
        return first

    results = run_ranks(tp * pp * dp, body)
    assert not [r for r in results if isinstance(r, Exception)], results
    assert client.calls == ["init", *["start", "update", "finish"] * 2]
    assert client.version == "2"
    assert set(client.tensors) == set(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(results[0][name], tensor.to(dtype)), name
        assert torch.equal(client.tensors[name], (tensor * 2).to(dtype)), name


@pytest.mark.parametrize("verb", ["init", "start", "update", "finish"])
def test_an_engine_failure_reaches_every_rank_and_the_next_attempt_is_whole(tmp_path, verb):
    config = tiny_config()
    tensors = random_tensors(config)
    folder = write_folder(tmp_path / "hf", config, tensors)
    client = RecordingClient(fail=verb)

    def body(comm):
        _, publisher = start_publisher(folder, config, comm, client, 2, 1)
        with pytest.raises(RuntimeError) as failure:
            publisher.publish(1)
        comm.all_gather(None)
        client.fail = ""
        publisher.publish(1)
        return failure.value

    first, second = run_ranks(2, body)
    assert "engine died" in str(first)
    assert isinstance(second, PeerError) and "rank 0: engine died" in str(second)
    assert client.calls[: client.calls.index(verb) + 1][-1] == verb and client.calls.count("finish") == (
        2 if verb == "finish" else 1
    )
    assert client.version == "1"
    assert all(torch.equal(client.tensors[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize("culprit", [0, 1])
@pytest.mark.parametrize("at", ["model.layers.0.mlp.up_proj.weight", "model.embed_tokens.weight"])
def test_a_rank_that_fails_in_the_middle_stops_the_update_everywhere(tmp_path, culprit, at, monkeypatch):
    monkeypatch.setattr("megatron_fleet.weight_sync.shared_buffer.BUCKET_BYTES", 1)
    config = tiny_config()
    tensors = random_tensors(config)
    folder = write_folder(tmp_path / "hf", config, tensors)
    client = RecordingClient()

    def body(comm):
        source, publisher = start_publisher(folder, config, comm, client, 2, 1)
        write = source.write_local

        def fail(out):
            if at in out and comm.rank == culprit:
                raise OSError("no such memory")
            write(out)

        source.write_local = fail
        with pytest.raises((OSError, RuntimeError)) as failure:
            publisher.publish(3)
        assert client.calls == ["init", "start", "update"] and client.version is None
        comm.all_gather(None)
        source.write_local = write
        publisher.publish(3)
        return failure.value

    results = run_ranks(2, body)
    assert isinstance(results[culprit], OSError), results
    other = results[1 - culprit]
    assert isinstance(other, PeerError) and f"rank {culprit}: no such memory" in str(other)
    assert client.version == "3"
    assert all(torch.equal(client.tensors[name], tensor) for name, tensor in tensors.items())


def test_a_client_that_survives_its_engines_does_not_finish_a_broken_update(tmp_path):
    config = tiny_config()
    folder = write_folder(tmp_path / "hf", config, random_tensors(config))
    client = RecordingClient()
    client.update_weights = lambda info: client.calls.append("update")  # as when all engines are lost in it

    def body(comm):
        source, publisher = start_publisher(folder, config, comm, client, 2, 1)
        if comm.rank == 1:
            source.write_local = lambda out: 1 / 0
        publisher.publish(1)

    first, second = run_ranks(2, body)
    assert isinstance(first, PeerError) and isinstance(second, ZeroDivisionError)
    assert "finish" not in client.calls


def test_a_rank_that_falls_silent_ends_the_update_on_every_rank(tmp_path, monkeypatch):
    monkeypatch.setattr("megatron_fleet.weight_sync.shared_buffer.STALL_S", 0.2)
    config = tiny_config()
    folder = write_folder(tmp_path / "hf", config, random_tensors(config))
    client = RecordingClient()

    def body(comm):
        _, publisher = start_publisher(folder, config, comm, client, 2, 1)
        if comm.rank == 1:
            publisher._write = lambda board, memory: None
        publisher.publish(1)

    for result in run_ranks(2, body):
        assert isinstance(result, PeerError) and "of round 1 did not come" in str(result)
    assert "finish" not in client.calls


def test_a_round_that_is_overwritten_is_not_taken(tmp_path):
    config = tiny_config()
    folder = write_folder(tmp_path / "hf", config, random_tensors(config))
    client = RecordingClient()
    _, publisher = start_publisher(folder, config, Alone(), client, 1, 1)
    publisher.publish(1)
    client.board.check_current(1)
    client.board.wait(SUMMED, 0, 1)
    publisher.publish(2)
    with pytest.raises(RoundLost, match="round 1 was overwritten by round 2"):
        client.board.check_current(1)
    with pytest.raises(RoundLost, match="overwritten"):
        client.board.wait(SUMMED, 0, 1)


def test_a_writer_that_never_comes_is_given_up(monkeypatch):
    monkeypatch.setattr("megatron_fleet.weight_sync.shared_buffer.STALL_S", 0.05)
    board = Board(torch.zeros(Board.nbytes(2, 2), dtype=torch.uint8), 2, 2)
    board.mark(SUMMED, 1, 0, 1)
    with pytest.raises(RoundLost, match="bucket 1 of round 1 did not come"):
        board.wait(SUMMED, 1, 1)
    board.mark(SUMMED, 1, 1, 1)
    board.wait(SUMMED, 1, 1)


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
from weight_fixtures import megatron_groups
with megatron_groups():
    source, publisher = start_publisher({folder!r}, tiny_config(), Alone(), RecordingClient(), 1, 1)
    publisher.publish(1)
print(publisher._client.memory.numel(), f"/proc/{{os.getpid()}}/fd/{{publisher._fd}}", flush=True)
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
        [ParamMeta("a", torch.float32, (3,)), ParamMeta("b", torch.bfloat16, (200,))],
        [ParamMeta("c", torch.int8, (1,))],
    ]
    layout = SharedLayout(metas, 2, scratch_bytes=100)
    start = layout.spans[0][0]
    assert start % 256 == 0 and start >= Board.nbytes(2, 2)
    assert [[slot.offset - start for slot in bucket] for bucket in layout.buckets] == [[0, 256], [768]]
    assert [(a - start, b - start) for a, b in layout.spans] == [(0, 768), (768, 1024)]
    assert (layout.scratch - start, layout.nbytes - start) == (1024, 1124)
    again = SharedLayout.parse(**layout.describe())
    assert (again.buckets, again.spans, again.nbytes) == (layout.buckets, layout.spans, layout.nbytes)


def test_the_checksum_sees_every_word_and_where_blocks_lie():
    generator = torch.Generator().manual_seed(0)
    memory = torch.randint(256, (5 * 32768 + 808,), dtype=torch.uint8, generator=generator)
    whole = checksum(memory)
    for at in (0, 7, 40_000, len(memory) - 1):
        for bit in (1, 128):
            memory[at] ^= bit
            assert checksum(memory) != whole
            memory[at] ^= bit
    assert checksum(memory) == whole
    blocks = memory[: 5 * 32768].view(5, -1)
    assert checksum(torch.cat([blocks[[1, 0, 2, 3, 4]].flatten(), memory[5 * 32768 :]])) != whole
    assert checksum(torch.zeros(0, dtype=torch.uint8)) == 0


def test_no_layer_is_split_and_the_first_group_comes_last():
    sizes = [300, 40, 20, 50, 10, 70, 5]
    groups = [[ParamMeta(f"{i}.{k}", torch.uint8, (n << 20,)) for k in range(2)] for i, n in enumerate(sizes)]
    buckets = [[meta.name[0] for meta in bucket] for bucket in make_buckets(groups)]
    assert [sorted(set(b)) for b in buckets] == [["1"], ["2"], ["3"], ["4"], ["5"], ["6"], ["0"]]
    assert [meta.name[0] for b in make_buckets(groups) for meta in b] == [
        str(i) for i in (1, 2, 3, 4, 5, 6, 0) for _ in "ab"
    ]
    small = [[ParamMeta(str(i), torch.uint8, (24 << 20,))] for i in range(6)]
    assert [[meta.name for meta in bucket] for bucket in make_buckets(small)] == [["1", "2"], ["3", "4"], ["5", "0"]]


def test_the_device_picks_the_publisher(tmp_path):
    config = tiny_config()
    folder = write_folder(tmp_path / "hf", config, random_tensors(config))
    source, first = start_publisher(folder, config, Alone(), RecordingClient(), 1, 1)
    first.close()
    publisher = make_publisher(source, RecordingClient(), Alone(), torch.device("cpu"))
    assert isinstance(publisher, ShmPublisher)
    publisher.close()

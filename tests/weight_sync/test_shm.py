"""Shared memory: contents, order of calls, failures of ranks and engines, and clean-up, over simulated ranks."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from local_sender import FolderWeights, LocalSender  # noqa: E402
from simulated_trainer import RecordingEngines, SimulatedTrainer  # noqa: E402
from waiting import HANG_S, until  # noqa: E402
from weight_fixtures import random_tensors, stage_chunks, tiny_config, write_folder  # noqa: E402

from megatron_fleet.config.errors import UserError  # noqa: E402
from megatron_fleet.platform.communicator import PeerError  # noqa: E402
from megatron_fleet.trainer.base import TrainerLost  # noqa: E402
from megatron_fleet.weight_sync.engine_format import EngineFormat  # noqa: E402
from megatron_fleet.weight_sync.registry import make_transport  # noqa: E402
from megatron_fleet.weight_sync.shm.board import SUMMED, Board, RoundLost  # noqa: E402
from megatron_fleet.weight_sync.shm.sender import ShmSender  # noqa: E402
from megatron_fleet.weights.exchange import Place  # noqa: E402
from megatron_fleet.weights.shards import load_hf  # noqa: E402
from megatron_fleet.weights.source import MegatronWeightSource  # noqa: E402

pytestmark = pytest.mark.usefixtures("groups")


class Replica:
    """The ranks of one data-parallel replica, as a part of the world."""

    def __init__(self, world, replica, tp, dp) -> None:
        self._world = world
        self._members = [r for r in range(world.size) if r // tp % dp == replica]
        self.rank, self.size = self._members.index(world.rank), len(self._members)

    def all_gather(self, value):
        values = self._world.all_gather(value)
        return [values[r] for r in self._members]


class MegatronRanks(SimulatedTrainer):
    """Ranks in Megatron's order: tensor fastest, then data, then pipeline.

    Attributes:
        sources: by rank.
    """

    def __init__(self, folder, config, tp=1, pp=1, dp=1, dtype=torch.float32) -> None:
        self.sources: dict[int, MegatronWeightSource] = {}

        def make(comm):
            tp_rank, replica, pp_rank = comm.rank % tp, comm.rank // tp % dp, comm.rank // (tp * dp)
            chunks = stage_chunks(config, (tp_rank, tp), pp_rank, pp)
            load_hf(chunks, folder)
            place = Place(replica, Replica(comm, replica, tp, dp))
            source = MegatronWeightSource(chunks, config, dtype=dtype, place=place)
            self.sources[comm.rank] = source
            return ShmSender(source, comm, torch.device("cpu"), EngineFormat())

        super().__init__(tp * pp * dp, make)


@pytest.fixture
def model(tmp_path):
    """Config, tensors and folder."""
    config = tiny_config()
    tensors = random_tensors(config)
    return config, tensors, write_folder(tmp_path / "hf", config, tensors)


@pytest.mark.parametrize(("tp", "pp", "dp"), [(1, 1, 1), (2, 2, 1), (2, 1, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
async def test_engines_see_every_tensor_of_every_version(tmp_path, tp, pp, dp, dtype):
    config = tiny_config(tie_word_embeddings=pp == 2)
    tensors = random_tensors(config)
    folder = write_folder(tmp_path / "hf", config, tensors)
    trainer, engines = MegatronRanks(folder, config, tp, pp, dp, dtype), RecordingEngines()
    transport = make_transport("shm")
    await transport.sync(trainer, engines, 1)
    first = dict(engines.tensors)
    with torch.no_grad():
        for source in trainer.sources.values():
            for local in source._local:
                local.view().mul_(2)
    await transport.sync(trainer, engines, 2)
    transport.close()
    transport.close()
    assert engines.calls == ["open", *["begin", "load", "finish"] * 2]
    assert (engines.version, engines.last_message) == (2, {"round": 2})
    assert set(engines.tensors) == set(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(first[name], tensor.to(dtype)), name
        assert torch.equal(engines.tensors[name], (tensor * 2).to(dtype)), name


@pytest.mark.parametrize("verb", ["open", "begin", "load", "finish"])
async def test_after_a_loss_of_all_engines_the_next_attempt_is_whole(model, verb):
    config, tensors, folder = model
    trainer, engines = MegatronRanks(folder, config, tp=2), RecordingEngines(fail=verb)
    transport = make_transport("shm")
    with pytest.raises(RuntimeError, match="all engines died"):
        await transport.sync(trainer, engines, 1)
    assert engines.version is None
    engines.fail = ""
    await transport.sync(trainer, engines, 1)
    assert engines.version == 1
    assert all(torch.equal(engines.tensors[name], tensor) for name, tensor in tensors.items())
    transport.close()


@pytest.mark.parametrize("culprit", [0, 1])
@pytest.mark.parametrize("at", ["model.layers.0.mlp.up_proj.weight", "model.embed_tokens.weight"])
async def test_a_rank_that_fails_in_the_middle_stops_the_update_everywhere(model, culprit, at, monkeypatch):
    monkeypatch.setattr("megatron_fleet.weight_sync.buckets.BUCKET_BYTES", 1)
    config, tensors, folder = model
    trainer, engines = MegatronRanks(folder, config, tp=2), RecordingEngines()
    transport = make_transport("shm")
    await trainer.prepare_weights("shm", {})
    weights = trainer._senders[culprit]._weights
    write = weights.write_local

    def fail(tensors, memory):
        if at in tensors:
            raise OSError("no such memory")
        write(tensors, memory)

    weights.write_local = fail
    with pytest.raises(OSError, match="no such memory"):
        await asyncio.wait_for(transport.sync(trainer, engines, 3), HANG_S)
    assert isinstance(trainer.errors[culprit], OSError)
    other = trainer.errors[1 - culprit]
    assert isinstance(other, PeerError) and f"rank {culprit}: no such memory" in str(other)
    assert engines.calls == ["open", "begin", "load"] and engines.version is None
    weights.write_local = write
    await transport.sync(trainer, engines, 3)
    assert engines.version == 3
    assert all(torch.equal(engines.tensors[name], tensor) for name, tensor in tensors.items())
    transport.close()


async def test_engines_that_wait_are_woken_when_the_trainer_dies(model):
    """Nobody is left to say so on the board but the controller."""
    config, _, folder = model
    trainer, engines = MegatronRanks(folder, config), RecordingEngines()
    transport = make_transport("shm")
    await transport.sync(trainer, engines, 1)
    send = trainer.send_weights

    async def die(version, options, deliver):
        await until(lambda: engines.calls.count("load") == 2)
        raise TrainerLost("rank 0 was killed")

    trainer.send_weights = die
    with pytest.raises(TrainerLost, match="rank 0 was killed"):
        await asyncio.wait_for(transport.sync(trainer, engines, 2), HANG_S)
    with pytest.raises(RoundLost, match="abandoned round 2"):
        engines.read(2)
    engines.read(1)  # no writer has begun: the last version is whole, and an engine that restarts takes it
    trainer.send_weights = send
    await transport.sync(MegatronRanks(folder, config), engines, 2)
    assert engines.version == 2 and engines.calls.count("open") == 1, "a new trainer takes the memory over"
    transport.close()


async def test_a_trainer_of_another_layout_gets_other_memory(model):
    config, tensors, folder = model
    engines, transport = RecordingEngines(), make_transport("shm")
    await transport.sync(MegatronRanks(folder, config, tp=2), engines, 1)
    old = engines.path
    await transport.sync(MegatronRanks(folder, config), engines, 2)
    assert engines.calls.count("open") == 2 and engines.layout.writers == 1
    assert not os.path.exists(old) or engines.path == old
    assert all(torch.equal(engines.tensors[name], tensor) for name, tensor in tensors.items())
    transport.close()


async def test_writers_are_waited_for_when_no_engine_takes_part(model):
    config, _, folder = model
    trainer, engines = MegatronRanks(folder, config, tp=2), RecordingEngines()
    transport = make_transport("shm")

    async def load(message):
        engines.calls.append("load")

    engines.load = load  # as when all engines are lost in it
    await trainer.prepare_weights("shm", {})
    trainer._senders[1]._weights.write_local = lambda tensors, memory: 1 / 0
    with pytest.raises(ZeroDivisionError):
        await transport.sync(trainer, engines, 1)
    assert "finish" not in engines.calls
    transport.close()


async def test_a_rank_that_falls_silent_ends_the_update_on_every_rank(model, monkeypatch):
    monkeypatch.setattr("megatron_fleet.weight_sync.shm.board.STALL_S", 0.2)
    config, _, folder = model
    trainer, engines = MegatronRanks(folder, config, tp=2), RecordingEngines()
    transport = make_transport("shm")
    await trainer.prepare_weights("shm", {})
    trainer._senders[1]._write = lambda memory, number: None
    with pytest.raises(PeerError, match="of round 1 was not sent"):
        await transport.sync(trainer, engines, 1)
    assert all(isinstance(e, PeerError) for e in trainer.errors)
    assert "finish" not in engines.calls
    transport.close()


async def test_a_round_that_is_overwritten_is_not_taken(model):
    config, _, folder = model
    trainer, engines = MegatronRanks(folder, config), RecordingEngines()
    transport = make_transport("shm")
    await transport.sync(trainer, engines, 1)
    engines.read(1)
    await transport.sync(trainer, engines, 2)
    with pytest.raises(RoundLost, match="round 1 was overwritten by round 2"):
        engines.board.check_current(1)
    with pytest.raises(RoundLost, match="overwritten"):
        engines.board.wait(SUMMED, 0, 1)
    transport.close()


def test_a_writer_that_never_comes_is_given_up(monkeypatch):
    monkeypatch.setattr("megatron_fleet.weight_sync.shm.board.STALL_S", 0.05)
    board = Board(torch.zeros(Board.nbytes(2, 2), dtype=torch.uint8).numpy(), 2, 2)
    board.mark(SUMMED, 1, 0, 1)
    with pytest.raises(RoundLost, match="bucket 1 of round 1 was not sent"):
        board.wait(SUMMED, 1, 1)
    board.mark(SUMMED, 1, 1, 1)
    board.wait(SUMMED, 1, 1)


def open_inodes():
    """Inodes of this process's open files."""
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the folder's own
            yield os.fstat(int(fd)).st_ino


async def test_too_little_memory_is_a_sentence_before_anything_is_written(monkeypatch, model):
    config, _, folder = model

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    inodes, create = set(), os.memfd_create

    def recorded(*arguments):
        fd = create(*arguments)
        inodes.add(os.fstat(fd).st_ino)
        return fd

    monkeypatch.setattr(os, "memfd_create", recorded)
    engines = RecordingEngines()
    with pytest.raises(UserError, match=r"shared memory.*No space left on device.*model.dtype"):
        await make_transport("shm").sync(MegatronRanks(folder, config), engines, 1)
    assert engines.calls == []
    assert inodes and not inodes & set(open_inodes())


async def test_a_trainer_on_another_host_is_a_sentence(model):
    config, _, folder = model
    trainer = MegatronRanks(folder, config, tp=2)
    key = (await trainer.prepare_weights("shm", {}))["key"]
    with pytest.raises(UserError, match=r"/proc/1/fd/9.*transport=shm.*one host"):
        await trainer.prepare_weights("shm", {"key": key, "path": "/proc/1/fd/9"})
    assert all(isinstance(e, UserError) for e in trainer.errors)


TRAINER = """
import asyncio, os, signal, sys
sys.path[:0] = {paths!r}
from local_sender import *
from pathlib import Path
weights = FolderWeights(Path({folder!r}))
sender = LocalSender(weights)
async def main():
    for line in sys.stdin:
        verb, options = eval(line)
        if verb == "prepare":
            print(repr(dict(await sender.prepare_weights("shm", options))), flush=True)
            continue
        if verb == "die":
            weights.before_write = lambda: os.kill(os.getpid(), signal.SIGKILL)
        await sender.send_weights(1, options, None)
        print("None", flush=True)
asyncio.run(main())
"""


class TrainerProcess:
    """`WeightSender` in a process of its own that can be killed."""

    def __init__(self, folder: Path) -> None:
        paths = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "weights")]
        code = TRAINER.format(paths=paths, folder=str(folder))
        self.process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.dies = False

    async def prepare_weights(self, transport, options):
        return await asyncio.to_thread(self._ask, "prepare", dict(options))

    async def send_weights(self, version, options, deliver):
        await asyncio.to_thread(self._ask, "die" if self.dies else "send", dict(options))

    def _ask(self, verb, options):
        print(repr((verb, options)), file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        if not line:
            raise TrainerLost(f"exit status {self.process.wait()}")
        return eval(line)


@pytest.mark.slow
async def test_the_memory_outlives_a_killed_trainer_and_has_its_last_version(model):
    _, tensors, folder = model
    trainer, engines, transport = TrainerProcess(folder), RecordingEngines(), make_transport("shm")
    await transport.sync(trainer, engines, 1)
    trainer.process.kill()
    trainer.process.wait()
    late = RecordingEngines()  # an engine that restarts while there is no trainer
    await late.open_transport(transport._memory.init_info)
    await late.load(engines.last_message)
    assert all(torch.equal(late.tensors[name], tensor) for name, tensor in tensors.items())

    dying = TrainerProcess(folder)
    dying.dies = True
    with pytest.raises(TrainerLost, match=f"exit status -{signal.SIGKILL:d}"):
        await asyncio.wait_for(transport.sync(dying, engines, 2), HANG_S)
    assert engines.version == 1
    with pytest.raises(RoundLost, match="round 1 was overwritten by round 2"):
        late.read(1)
    local = LocalSender(FolderWeights(folder))
    await transport.sync(local, engines, 2)
    assert engines.version == 2 and engines.calls.count("open") == 1
    assert all(torch.equal(engines.tensors[name], tensor) for name, tensor in tensors.items())
    transport.close()


CONTROLLER = """
import asyncio, os, sys, time
sys.path[:0] = {paths!r}
from local_sender import *
from pathlib import Path
from simulated_trainer import RecordingEngines
from megatron_fleet.weight_sync.registry import make_transport
engines, transport = RecordingEngines(), make_transport("shm")
asyncio.run(transport.sync(LocalSender(FolderWeights(Path({folder!r}))), engines, 1))
print(engines.memory.numel(), engines.path, flush=True)
time.sleep(3600)
"""


@pytest.mark.slow
def test_nothing_is_left_when_the_controller_is_killed(model):
    _, _, folder = model
    here = Path(__file__).parent
    paths = [str(here), str(here.parent), str(here.parent / "weights")]
    before = set(os.listdir("/dev/shm"))
    code = CONTROLLER.format(paths=paths, folder=str(folder))
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        nbytes, path = owner.stdout.readline().split()
        other = torch.from_file(path, shared=True, size=int(nbytes), dtype=torch.uint8)
        assert other.any()
    finally:
        owner.kill()
        owner.wait()
    assert not os.path.exists(path)
    assert {n for n in os.listdir("/dev/shm") if "megatron_fleet" in n} <= before
    assert other.any(), "an engine that has the memory mapped keeps it"

"""A pickle that runs a command, in each file that is read on resume, on replay and on conversion: it never runs."""

from __future__ import annotations

import asyncio
import io
import json
import os
import pickle
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, ModuleType, SimpleNamespace

import pytest

pytest.importorskip("megatron_fleet.trainer.megatron")

import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject
from policy_fixtures import make_batch, make_config, write_config
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

from megatron_fleet import cli
from megatron_fleet.checkpoint.checkpoints import Checkpoint, Checkpoints
from megatron_fleet.config.errors import UserError
from megatron_fleet.debug.dumps import Dumps, Record
from megatron_fleet.storage.local import fingerprint, list_files
from megatron_fleet.trainer.megatron import extra_state
from megatron_fleet.trainer.megatron import state as trainer_state
from megatron_fleet.trainer.megatron.policy import MegatronPolicy

TENSOR, OBJECT = "decoder.final_layernorm.weight", "decoder.layers.mlp.linear_fc1._extra_state/shard_0_4"


class Payload:
    """Unpickled, it leaves a file behind."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self._marker}",)


@dataclass
class Trap:
    marker: Path

    def pickle(self) -> bytes:
        return pickle.dumps(Payload(self.marker))

    def saved(self, value=None) -> bytes:
        """As of ``torch.save``, larger than any chunk of the model."""
        file = io.BytesIO()
        torch.save({"value": Payload(self.marker) if value is None else value, "room": torch.zeros(100_000)}, file)
        return file.getvalue()

    def fires(self) -> bool:
        fired = self.marker.exists()
        self.marker.unlink(missing_ok=True)
        return fired


@pytest.fixture
def trap(tmp_path):
    trap = Trap(tmp_path / "marker")
    pickle.loads(trap.pickle())
    assert trap.fires()
    torch.load(io.BytesIO(trap.saved()), weights_only=False)
    assert trap.fires()
    return trap


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A model of one rank, its configuration, and the folder of a checkpoint of it."""
    folder = tmp_path_factory.mktemp("made")
    config = make_config(write_config(folder / "model"))
    policy = MegatronPolicy(config, init="random")

    async def write_state(path):
        policy.save_state(path)
        return {}

    saved = asyncio.run(Checkpoints(folder / "checkpoints", 1).save(3, write_state, {"step": 3}))
    yield policy, config, saved.path
    policy.close()


@pytest.fixture
def checkpoint(made, tmp_path):
    """A copy of the checkpoint to plant things in."""
    path = tmp_path / "checkpoints" / made[2].name
    shutil.copytree(made[2], path)
    return path


def agree(folder: Path) -> None:
    """Make the manifest of a folder that of the files as they are: an attacker can, too."""
    manifest = folder / "manifest.json"
    content = json.loads(manifest.read_text())
    content["files"] = {
        file.relative_to(folder).as_posix(): fingerprint(file) for file in list_files(folder) if file != manifest
    }
    manifest.write_text(json.dumps(content))


def resume(policy: MegatronPolicy, checkpoints: Path) -> None:
    """Read everything that a run reads, in its order."""
    found = Checkpoints(checkpoints, 1).newest()
    found.trainer_state()
    policy.load_state(found.path)


def put(folder: Path, key: str, content: bytes, entry=None) -> None:
    """Let ``.metadata`` say that ``key`` is ``content``, which is appended to a data file."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    index = next(i for i in metadata.storage_data if i.fqn == key)
    place = metadata.storage_data.pop(index)
    data = folder / place.relative_path
    place.offset, place.length = data.stat().st_size, len(content)
    with data.open("ab") as file:
        file.write(content)
    if entry is not None:
        metadata.state_dict_metadata[key], index = entry, MetadataIndex(key)
    metadata.storage_data[index] = place
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


FILES = [".metadata", "common.pt", "metadata.json", "trainer_state.json", "manifest.json"]


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_a_pickle(made, checkpoint, trap, name):
    (checkpoint / name).write_bytes(trap.pickle())
    if name != "manifest.json":
        with pytest.raises(UserError, match=r"has \d+ bytes, the checkpoint's manifest\.json says"):
            resume(made[0], checkpoint.parent)
        agree(checkpoint)
    with pytest.raises(UserError) as refusal:
        resume(made[0], checkpoint.parent)
    assert str(checkpoint / name) in str(refusal.value)
    assert len(str(refusal.value)) < 600 and "\n" not in str(refusal.value)
    assert not trap.fires()


@pytest.mark.parametrize("name", ["common.pt", "__0_0.distcp"])
def test_a_file_of_torch_with_a_pickle_inside(made, checkpoint, trap, name, monkeypatch):
    # With this variable torch.load unpickles wherever nobody said what to do.
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    if name == "common.pt":
        (checkpoint / name).write_bytes(trap.saved())
    else:
        put(checkpoint, TENSOR, trap.saved())
    agree(checkpoint)
    with pytest.raises(UserError, match="is damaged, or holds something other than tensors") as refusal:
        resume(made[0], checkpoint.parent)
    assert str(checkpoint / name) in str(refusal.value)
    assert not trap.fires()


@pytest.mark.parametrize(
    ("key", "words"),
    [
        (OBJECT, r"__0_0\.distcp is damaged, or holds something other than tensors"),
        (TENSOR, rf"holds no {TENSOR} as the model has it"),
    ],
)
def test_an_object_among_the_shards(made, checkpoint, trap, key, words):
    """A tensor that is declared to be an object would be unpickled as one."""
    put(checkpoint, key, trap.saved(), BytesStorageMetadata())
    agree(checkpoint)
    with pytest.raises(UserError, match=words):
        resume(made[0], checkpoint.parent)
    assert not trap.fires()


def test_an_object_that_megatron_does_not_save(made, checkpoint):
    file = io.BytesIO()
    torch.save({"no": "list"}, file)
    put(checkpoint, OBJECT, file.getvalue())
    agree(checkpoint)
    with pytest.raises(UserError, match=f"{OBJECT} is not an object that Megatron saves"):
        resume(made[0], checkpoint.parent)


class DelayedScaling:
    """Stand-in for Transformer Engine's, which needs a GPU."""

    def __init__(self, margin=0, amax_history_len=1024):
        self.margin, self.amax_history_len = margin, amax_history_len


@pytest.fixture
def transformer_engine(monkeypatch):
    monkeypatch.setattr(DelayedScaling, "__module__", "transformer_engine.common.recipe")
    for name in ("transformer_engine", "transformer_engine.common", "transformer_engine.common.recipe"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["transformer_engine.common.recipe"].DelayedScaling = DelayedScaling


def as_bytes(state) -> torch.Tensor:
    """As of ``get_extra_state`` of Transformer Engine 2."""
    return torch.frombuffer(bytearray(pickle.dumps(state)), dtype=torch.uint8)


def delayed(**more):
    values = {
        "scale_fwd": torch.rand(3), "amax_history_fwd": torch.rand(16, 3), "scale_bwd": torch.rand(2),
        "amax_history_bwd": torch.rand(16, 2),
    }  # fmt: skip
    extra = {"num_gemms": 1, "fp8_checkpoint": True, "fp8_max_fwd": 448.0}
    return {"recipe": DelayedScaling(1, 16), **values, "extra_fp8_variables": extra} | more


@pytest.fixture(params=["torch.storage._load_from_bytes", "megatron.core.safe_globals.safe_load_from_bytes"])
def reader_of_storages(request, monkeypatch):
    """The function that a pickled tensor names: PyTorch's, or that of Megatron-Core 0.19, which takes its place."""
    module, _, name = request.param.rpartition(".")
    function = torch.storage._load_from_bytes
    if not request.param.startswith("torch"):
        function = FunctionType(function.__code__, function.__globals__, name)
        function.__module__, function.__qualname__ = module, name
    monkeypatch.setattr(sys.modules[module], name, function, raising=False)
    monkeypatch.setattr(torch.storage, "_load_from_bytes", function)
    return request.param


def test_scales_of_delayed_fp8_are_kept(transformer_engine, reader_of_storages):
    state = delayed()
    assert reader_of_storages.rpartition(".")[2].encode() in pickle.dumps(state)
    rebuilt = pickle.loads(extra_state.rebuild(as_bytes(state)).numpy().tobytes())
    assert rebuilt.keys() == state.keys()
    for name in ("scale_fwd", "amax_history_fwd", "scale_bwd", "amax_history_bwd"):
        assert torch.equal(rebuilt[name], state[name])
    assert rebuilt["extra_fp8_variables"] == state["extra_fp8_variables"]
    assert rebuilt["recipe"].amax_history_len == 16


class Strict(torch.nn.Module):
    """Loads a state as modules of Transformer Engine 2.20 do, which refuse pickles unless a variable allows them."""

    loaded = None

    def set_extra_state(self, state):
        assert os.getenv("NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE", "0") == "1", "Refusing to load pickled extra state"
        self.loaded = pickle.loads(state.numpy().tobytes())

    def get_extra_state(self):
        return None


@pytest.mark.parametrize("own", [None, "0", "1"])
def test_a_state_of_delayed_fp8_is_loaded(transformer_engine, tmp_path, monkeypatch, own):
    variable = "NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE"
    monkeypatch.delenv(variable, raising=False) if own is None else monkeypatch.setenv(variable, own)
    saved = delayed()
    entry = ShardedObject("linear._extra_state", None, (1,), (0,))
    reader = SimpleNamespace(path=tmp_path, read_objects=lambda key, count: [as_bytes(saved)] * count)
    module = Strict()
    trainer_state._load_model(reader, module, {"_extra_state": entry})
    assert torch.equal(module.loaded["scale_fwd"], saved["scale_fwd"])
    assert os.environ.get(variable) == own, "others are not loaded by it"


@pytest.mark.parametrize("nothing", [None, torch.empty(0, dtype=torch.uint8), io.BytesIO(b"old"), as_bytes({"a": 1})])
def test_other_extra_states_are_left_out(nothing):
    assert extra_state.rebuild(nothing) is None


@pytest.mark.parametrize("where", ["state", "tensor", "recipe", "variable"])
def test_a_pickle_in_an_extra_state(made, checkpoint, trap, transformer_engine, where):
    """Transformer Engine unpickles what a tensor of bytes holds."""
    state = {
        "state": Payload(trap.marker),
        "tensor": delayed(scale_fwd=Payload(trap.marker)),
        "recipe": delayed(recipe=Payload(trap.marker)),
        "variable": delayed(extra_fp8_variables={"num_gemms": Payload(trap.marker)}),
    }[where]
    file = io.BytesIO()
    torch.save([as_bytes(state)], file)
    put(checkpoint, OBJECT, file.getvalue())
    agree(checkpoint)
    with pytest.raises(UserError, match=r"linear_fc1\._extra_state asks for 'posix\.system'"):
        resume(made[0], checkpoint.parent)
    assert not trap.fires()


@pytest.mark.parametrize(
    "name", ["config.json", "record.json", "data.npz", "manifest.json", "model/config.json", "state/.metadata"]
)
@pytest.mark.slow
def test_a_dump_with_a_pickle(made, trap, tmp_path, capsys, name):
    policy, config, _ = made

    async def write_state(path):
        policy.save_state(path)
        return {}

    record = Record(1, 0, "spike", "cpu", 1e-3, 0.0, 1.0, 0.1, [], [], [], 1)
    dump = asyncio.run(Dumps(tmp_path / "dumps", 1, config).save(write_state, make_batch(count=2), record))
    (dump / name).write_bytes(trap.pickle())
    if name != "manifest.json":
        agree(dump)
    assert cli.main(["debug", "replay", str(dump)]) == 2
    told = capsys.readouterr().err
    assert name in told and "Traceback" not in told
    assert not trap.fires()


@pytest.mark.parametrize("name", [".metadata", "common.pt", "__0_0.distcp"])
def test_a_conversion_of_a_checkpoint_with_a_pickle(made, checkpoint, trap, tmp_path, capsys, name):
    if name == "__0_0.distcp":
        put(checkpoint, TENSOR, trap.saved())
    else:
        (checkpoint / name).write_bytes(trap.pickle() if name == ".metadata" else trap.saved())
    agree(checkpoint)
    template = str(tmp_path / "template")
    made[0].export_hf(Path(template))
    assert cli.main(["convert", "to-hf", str(checkpoint), str(tmp_path / "hf"), "--template", template]) == 2
    told = capsys.readouterr().err
    assert name in told and "Traceback" not in told
    assert not trap.fires()
    assert not (tmp_path / "hf").exists()


def test_the_checkpoint_is_good_without_them(made, checkpoint):
    resume(made[0], checkpoint.parent)
    Checkpoint.open(checkpoint).verify()

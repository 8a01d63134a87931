"""The engines' half inside vLLM, with a model that only records: what it loads, what it refuses, and when."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from folder_source import FolderSource  # noqa: E402
from local_sender import LocalSender  # noqa: E402
from tiny_models import make, stored_tensors, unstacked  # noqa: E402
from vllm.distributed.weight_transfer import ipc_engine  # noqa: E402
from vllm.model_executor.layers.fused_moe.config import FusedMoEParallelConfig  # noqa: E402
from vllm.model_executor.layers.fused_moe.expert_map_manager import ExpertMapManager  # noqa: E402

from megatron_fleet.weight_sync import buckets, reloading  # noqa: E402
from megatron_fleet.weight_sync.cuda_ipc import engine as cuda_ipc_engine  # noqa: E402
from megatron_fleet.weight_sync.registry import make_transport  # noqa: E402
from megatron_fleet.weight_sync.shm.board import SUMMED, RoundLost  # noqa: E402
from megatron_fleet.weight_sync.shm.engine import ShmEngine, ShmInitInfo, ShmUpdateInfo  # noqa: E402
from megatron_fleet.weights.hf_model import open_model  # noqa: E402


class Model(torch.nn.Module):
    """A model that only records. Args: ``managers``: of the experts of its layers."""

    def __init__(self, *managers: ExpertMapManager) -> None:
        super().__init__()
        self.loaded: dict[str, torch.Tensor] = {}
        for number, manager in enumerate(managers):
            layer = torch.nn.Module()
            layer.expert_map_manager = manager
            self.add_module(str(number), layer)

    def load_weights(self, weights):
        self.loaded |= {name: tensor.clone() for name, tensor in weights}


class Engine:
    """A receiver around one transfer engine in this process. ``before`` runs before a verb."""

    def __init__(self, folder) -> None:
        self.engine = object.__new__(ShmEngine)
        self.engine._memory, self.engine._round = None, 0
        self.engine.model, self.engine.device = Model(), torch.device("cpu")
        self.engine.model_config = SimpleNamespace(
            model=str(folder), hf_config=None, enable_sleep_mode=False, multimodal_config=None
        )
        self.before: dict[str, object] = {}
        self.version: int | None = None

    @property
    def loaded(self):
        return self.engine.model.loaded

    async def open_transport(self, info):
        self.engine.init_transfer_engine(ShmInitInfo(**info))

    async def begin_update(self):
        self.engine.start_weight_update()

    async def load(self, info):
        await asyncio.to_thread(self.before.pop("load", lambda: None))
        await asyncio.to_thread(self.engine.receive_weights, ShmUpdateInfo(**info))

    async def finish_update(self, version, message):
        self.engine.finish_weight_update()
        self.version = version


@pytest.fixture
def setup(tmp_path, monkeypatch):
    """Folder, engine, and a function that syncs a version, of a model in several buckets."""
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 1)
    monkeypatch.setattr(reloading, "initialize_layerwise_reload", lambda model: None)
    monkeypatch.setattr(reloading, "finalize_layerwise_reload", lambda model, config: None)
    opened = []

    def start(family="qwen3"):
        folder = make(family, tmp_path / family)
        engine, sender = Engine(folder), LocalSender(FolderSource(folder), open_model(folder))
        transport = make_transport("shm")
        opened.append(transport)
        return folder, engine, lambda version: asyncio.run(transport.sync(sender, engine, version))

    yield start
    for transport in opened:
        transport.close()


@pytest.mark.parametrize("family", ["qwen3", "kimi_k25", "moonlight", "qwen3_5_moe"])
def test_all_the_engines_folder_stores_is_loaded_but_what_megatron_has_not(setup, family):
    """Experts that it stacks are loaded one by one."""
    folder, engine, sync = setup(family)
    sync(1)
    stored, passthrough = unstacked(stored_tensors(folder)), open_model(folder, prediction=False).passthrough
    assert set(engine.loaded) == set(stored) - set(passthrough)
    assert (family == "qwen3") == (not passthrough)
    assert engine.version == 1


def experts_of_device(rank: int, devices: int = 2, balanced: bool = False) -> ExpertMapManager:
    """vLLM's map of 8 experts spread over devices."""
    sizes = dict.fromkeys(("tp_size", "pcp_size", "dp_size", "sp_size"), 1) | {"ep_size": devices}
    ranks = dict.fromkeys(("tp_rank", "pcp_rank", "dp_rank"), 0) | {"ep_rank": rank}
    parallel = FusedMoEParallelConfig(**sizes, **ranks, use_ep=devices > 1, all2all_backend="", enable_eplb=balanced)
    return ExpertMapManager(64, 2, 8, 0, None, parallel, "linear", balanced)


def names_of_experts(names, experts):
    return {name for name in names if any(f".experts.{expert}." in name for expert in experts)}


@pytest.mark.parametrize(
    ("managers", "own"),
    [
        ([experts_of_device(0), experts_of_device(0)], range(4)),
        ([experts_of_device(1)], range(4, 8)),
        ([experts_of_device(0), experts_of_device(1)], range(8)),
        ([experts_of_device(0, devices=1)], range(8)),
        ([experts_of_device(0, balanced=True)], range(8)),  # vLLM then puts experts where they are needed
    ],
)
def test_a_device_loads_only_its_experts(setup, managers, own):
    folder, engine, sync = setup("kimi_k25")
    engine.engine.model = Model(*managers)
    sync(1)
    names = set(stored_tensors(folder)) - set(open_model(folder, prediction=False).passthrough)
    assert set(engine.loaded) == names - names_of_experts(names, range(8)) | names_of_experts(names, own)
    assert len(names_of_experts(names, own)) == len(own) * 3 * 3 * 3  # layers, matrices, parts


def test_a_device_that_takes_chunks_from_a_rank_loads_only_its_experts(monkeypatch):
    """vLLM's own half of CUDA IPC, with the mapping of the buffer cut off."""
    tensors = {f"model.layers.1.mlp.experts.{e}.up_proj.weight": torch.tensor([e]) for e in range(8)}
    tensors["model.layers.1.mlp.shared_experts.up_proj.weight"] = torch.tensor([9])
    monkeypatch.setattr(ipc_engine, "packed_ipc_consumer", lambda **_: list(tensors.items()))
    monkeypatch.setattr(cuda_ipc_engine, "begin_reload", lambda engine: None)
    engine = object.__new__(cuda_ipc_engine.CudaIpcEngine)
    engine.model, engine.device, engine.packed = Model(experts_of_device(1)), torch.device("cuda:0"), True
    engine._received, engine._packed_importer = set(), None
    model = engine.model
    engine.start_weight_update()
    sent = {"names": list(tensors), "shapes": [], "dtype_names": [], "tensor_sizes": [], "ipc_handles": {}}
    engine.receive_weights(SimpleNamespace(**sent))
    assert engine.model is model and engine._received == set(tensors)
    assert set(model.loaded) == set(tensors) - names_of_experts(tensors, range(4))


@pytest.mark.parametrize("family", ["kimi_k25", "qwen3_vl"])
def test_what_the_trainer_has_not_comes_from_the_engines_folder_when_sleep_may_have_lost_it(setup, family):
    folder, engine, sync = setup(family)
    stored, passthrough = stored_tensors(folder), open_model(folder).passthrough
    assert passthrough
    engine.engine.model_config.multimodal_config = SimpleNamespace(language_model_only=True)
    engine.engine.model_config.enable_sleep_mode = True
    sync(1)
    assert not set(engine.loaded) & set(passthrough), "no part of the model that is served"
    engine.engine.model_config.multimodal_config = SimpleNamespace(language_model_only=False)
    sync(2)
    for name in passthrough:
        assert torch.equal(engine.loaded[name].view(-1).view(torch.uint8), stored[name].view(-1).view(torch.uint8))


def test_nothing_of_a_bucket_is_loaded_when_its_bytes_changed(setup):
    _, engine, sync = setup()

    def tear():
        half = engine.engine
        for bucket in range(len(half._layout.buckets)):
            half._board.wait(SUMMED, bucket, 1)
        half._memory[half._layout.buckets[2][-1].offset + 1] ^= 1

    engine.before["load"] = tear
    with pytest.raises(ValueError, match="checksum of bucket 2 differs"):
        sync(1)
    layout = engine.engine._layout
    assert set(engine.loaded) == {slot.meta.name for bucket in layout.buckets[:2] for slot in bucket}
    assert engine.version is None
    with pytest.raises(RuntimeError, match="without all tensors"):
        engine.engine.finish_weight_update()
    sync(1)
    assert len(engine.loaded) == sum(map(len, layout.buckets)) and engine.version == 1


def test_an_update_that_is_overwritten_before_it_is_complete_fails(setup):
    _, engine, sync = setup()
    sync(1)
    half = engine.engine
    half.start_weight_update()
    half.receive_weights(ShmUpdateInfo(1))
    half._board.begin(0, 2)
    with pytest.raises(RoundLost, match="round 1 was overwritten by round 2"):
        half.finish_weight_update()


def test_a_round_that_the_trainer_gave_up_fails_at_once(setup):
    _, engine, sync = setup()
    sync(1)
    half = engine.engine
    half._board.begin(0, 2)
    half._board.abandon(2)
    half.start_weight_update()
    with pytest.raises(RoundLost, match="abandoned round 2"):
        half.receive_weights(ShmUpdateInfo(2))


def test_an_engine_of_another_model_refuses_before_it_touches_anything(setup, tmp_path):
    _, engine, sync = setup()
    engine.engine.model_config.model = str(make("qwen2", tmp_path / "other"))
    with pytest.raises(ValueError, match=r"lacks 12 tensors of .*first 'model.layers.0.self_attn.k_proj.bias'"):
        sync(1)
    assert engine.loaded == {}
    with pytest.raises(RuntimeError, match="before init_weight_transfer_engine"):
        engine.engine.start_weight_update()


def test_an_engine_without_a_checkpoint_takes_what_comes(setup, tmp_path):
    _, engine, sync = setup()
    engine.engine.model_config.model = str(tmp_path)
    sync(1)
    assert engine.loaded


def test_on_a_gpu_a_bucket_is_freed_after_the_copies_out_of_it(tmp_path, monkeypatch):
    """Another thread allocates the next bucket on another stream, for which freed memory is free at once."""
    engine, order = Engine(tmp_path).engine, []
    engine.device = torch.device("cuda", 0)
    monkeypatch.setattr(engine.model, "load_weights", lambda tensors: order.append(f"load {next(iter(tensors))[0]}"))
    stream = SimpleNamespace(synchronize=lambda: order.append("wait"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)

    def received():
        for name in ("first", "second"):
            order.append(f"receive {name}")
            yield [(name, torch.zeros(1))]

    engine.load_buckets(received())
    assert order == ["receive first", "load first", "wait", "receive second", "load second", "wait"]

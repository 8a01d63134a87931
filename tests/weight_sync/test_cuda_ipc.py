"""``cuda_ipc``: vLLM's own trainer engine behind our sender, with CUDA cut off below it, and the engines' half."""

from __future__ import annotations

import asyncio
import inspect
from types import SimpleNamespace
from typing import Any

import msgpack
import pytest

torch = pytest.importorskip("torch")
base = pytest.importorskip("vllm.distributed.weight_transfer.base")

from folder_source import FolderSource  # noqa: E402
from local_sender import LocalSender  # noqa: E402
from tiny_models import make, stored_tensors  # noqa: E402
from vllm.distributed.weight_transfer import ipc_engine  # noqa: E402
from waiting import HANG_S  # noqa: E402

from megatron_fleet.config.errors import UserError  # noqa: E402
from megatron_fleet.platform.communicator import Alone  # noqa: E402
from megatron_fleet.weight_sync.cuda_ipc import sender as cuda_ipc_sender  # noqa: E402
from megatron_fleet.weight_sync.cuda_ipc.engine import CudaIpcEngine  # noqa: E402
from megatron_fleet.weight_sync.engine_format import EngineFormat  # noqa: E402
from megatron_fleet.weight_sync.registry import make_transport  # noqa: E402
from megatron_fleet.weights.exchange import FormattedSource  # noqa: E402
from megatron_fleet.weights.hf_model import open_model  # noqa: E402
from megatron_fleet.weights.source import MegatronWeightSource  # noqa: E402


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_a_rank_whose_memory_cannot_be_shared_says_so(monkeypatch, name):
    monkeypatch.setenv(name, "expandable_segments:True")
    with pytest.raises(UserError, match=rf"^{name}=expandable_segments:True: .*transport=disk\.$"):
        cuda_ipc_sender.CudaIpcSender(None, Alone(), torch.device("cpu"), EngineFormat())


class Engines:
    """Engines that read the messages as vLLM does."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.names: list[str] = []
        self.fail = False
        self.version: int | None = None

    async def open_transport(self, init_info) -> None:
        self.calls.append("open")
        assert ipc_engine.IPCWeightTransferInitInfo(**init_info).packed

    async def begin_update(self) -> None:
        self.calls.append("begin")

    async def load(self, message) -> None:
        if self.fail:
            raise RuntimeError("no engine is left")
        info = ipc_engine.IPCWeightTransferUpdateInfo(**msgpack.unpackb(msgpack.packb(message)))
        assert info.ipc_handles == {"GPU-0": ("handle", torch.uint8)}
        self.names += info.names

    async def finish_update(self, version, message) -> None:
        self.calls.append("finish")
        assert message is None, "an engine that restarts cannot load it again by itself"
        self.version = version


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make("deepseek_v3_fp8", tmp_path_factory.mktemp("cuda_ipc") / "hf")


@pytest.fixture
def produced(monkeypatch):
    """Names of all that vLLM's trainer engine packs, on a machine without CUDA."""
    names: list[str] = []

    def pack(iterator, gpu_uuid, post_iter_func, buffer_size_bytes):
        for name, tensor in iterator:
            assert tensor.nbytes <= buffer_size_bytes
            names.append(name)
            dtype = str(tensor.dtype).removeprefix("torch.")
            yield SimpleNamespace(
                names=[name], shapes=[list(tensor.shape)], dtype_names=[dtype], tensor_sizes=[tensor.nbytes],
                ipc_handle={gpu_uuid: ("handle", torch.uint8)},
            )  # fmt: skip

    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid="GPU-0"))
    monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: None)
    monkeypatch.setattr(ipc_engine, "packed_ipc_producer", pack)
    return names


async def test_every_stored_tensor_is_sent_to_all_engines_and_again_to_one(folder, produced):
    sender, transport = LocalSender(FolderSource(folder), open_model(folder)), make_transport("cuda_ipc")
    for version in (5, 5, 6):
        engines = Engines()
        await transport.sync(sender, engines, version)
        assert engines.calls == ["open", "begin", "finish"] and engines.version == version
        assert set(engines.names) == set(stored_tensors(folder)) and len(engines.names) == len(set(engines.names))
    sender.close()


async def test_an_engine_that_is_replaced_gets_the_version_inside_the_update_it_was_lost_in(folder, produced):
    sender, transport = LocalSender(FolderSource(folder), open_model(folder)), make_transport("cuda_ipc")
    engines, replaced = Engines(), Engines()

    async def finish(version, message):
        await transport.sync(sender, replaced, version)

    engines.finish_update = finish
    await asyncio.wait_for(transport.sync(sender, engines, 3), HANG_S)
    assert replaced.version == 3 and set(replaced.names) == set(stored_tensors(folder))


async def test_a_delivery_that_fails_is_raised_after_the_ranks_went_through(folder, produced):
    sender, transport, engines = (
        LocalSender(FolderSource(folder), open_model(folder)),
        make_transport("cuda_ipc"),
        Engines(),
    )
    engines.fail = True
    with pytest.raises(RuntimeError, match="no engine is left"):
        await transport.sync(sender, engines, 1)
    assert set(produced) == set(stored_tensors(folder)), "other ranks gather to the end, and this one with them"
    assert engines.version is None
    engines.fail = False
    await transport.sync(sender, engines, 1)
    assert engines.version == 1


def test_a_tensor_larger_than_the_buffer_gets_a_larger_one(folder, produced, monkeypatch):
    monkeypatch.setattr(cuda_ipc_sender, "BUFFER_BYTES", 1000)
    form = EngineFormat()
    made = cuda_ipc_sender.CudaIpcSender(FolderSource(folder), Alone(), torch.device("cpu"), form)
    largest = max(meta.nbytes for meta in FolderSource(folder).metadata())
    assert made._engine.packed_buffer_size_bytes == largest > 1000


@pytest.mark.parametrize("source", [FormattedSource, MegatronWeightSource])
def test_sources_have_the_methods_that_vllm_calls(source):
    for name in ("metadata", "__iter__"):
        ours, theirs = (inspect.signature(getattr(cls, name)) for cls in (source, base.WeightSource))
        assert list(ours.parameters) == list(theirs.parameters)


def test_the_client_has_the_methods_of_vllms_protocol():
    for name, method in vars(base.VLLMWeightSyncClient).items():
        if not name.startswith("_"):
            ours = inspect.signature(getattr(cuda_ipc_sender.OutboxClient, name))
            assert list(ours.parameters) == list(inspect.signature(method).parameters), name


def test_an_update_that_lacks_a_tensor_is_not_finished(folder, monkeypatch):
    finished: list[Any] = []
    monkeypatch.setattr(ipc_engine.IPCWeightTransferEngine, "finish_weight_update", lambda self: finished.append(self))
    monkeypatch.setattr(ipc_engine.IPCWeightTransferEngine, "receive_weights", lambda self, info: None)
    engine = object.__new__(CudaIpcEngine)
    engine._received, engine.model, engine._loading = set(), None, None
    engine.model_config = SimpleNamespace(
        model=str(folder), hf_config=None, multimodal_config=None, enable_sleep_mode=True
    )
    names = sorted(stored_tensors(folder))
    engine.receive_weights(SimpleNamespace(names=names[1:]))
    with pytest.raises(ValueError, match=f"lacks 1 tensors .*first '{names[0]}'"):
        engine.finish_weight_update()
    assert finished == []
    engine.receive_weights(SimpleNamespace(names=names[:1]))
    engine.finish_weight_update()
    assert finished == [engine]

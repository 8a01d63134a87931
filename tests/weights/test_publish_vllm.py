"""vLLM's own trainer engines behind our publishers: what they are given, and what they ask of source and client."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import pytest

torch = pytest.importorskip("torch")
base = pytest.importorskip("vllm.distributed.weight_transfer.base")

from folder_source import FolderSource  # noqa: E402
from tiny_models import make, stored_tensors  # noqa: E402
from vllm.distributed.weight_transfer import nccl_engine  # noqa: E402
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory  # noqa: E402

from megatron_fleet.weight_sync.wire import Wire, WireSource  # noqa: E402
from megatron_fleet.weights import publish  # noqa: E402
from megatron_fleet.weights.hf_model import open_model  # noqa: E402
from megatron_fleet.weights.source import MegatronWeightSource  # noqa: E402


@dataclass
class World:
    rank: int = 0
    size: int = 2


class Client:
    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def init_weight_transfer_engine(self, init_info):
        self.calls.append(("init", init_info))

    def start_weight_update(self):
        self.calls.append(("start",))

    def update_weights(self, update_info):
        self.calls.append(("update", update_info))

    def finish_weight_update(self, weight_version=None):
        self.calls.append(("finish", weight_version))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make("deepseek_v3_fp8", tmp_path_factory.mktemp("publish") / "hf")


def make_publisher(kind, folder, client, rank=0):
    source, wire = FolderSource(folder), Wire(open_model(folder))
    if kind == "ipc":
        return publish.ipc_publisher(source, client, World(rank), wire)
    if kind == "nccl":
        return publish.nccl_publisher(source, client, World(rank), wire, "10.0.0.1", 7000, 4)
    return publish.sharded_publisher(source, client, World(rank), wire, 8, 4, "run")


@pytest.mark.parametrize(
    ("kind", "backend", "fields"),
    [
        ("ipc", "ipc", {"rank": 1, "packed": True, "packed_buffer_size_bytes": 1 << 30}),
        ("nccl", "nccl", {"rank": 1, "master_address": "10.0.0.1", "master_port": 7000, "world_size": 5}),
        ("sharded", "sharded_rdt", {"num_consumers": 8, "workers_per_replica": 4, "trainer_actor_namespace": "run"}),
    ],
)
def test_each_backend_is_given_what_the_installed_vllm_asks_for(folder, monkeypatch, kind, backend, fields):
    given = {}

    class Engine:
        def send_weights(self):
            given["client"].finish_weight_update()

        def shutdown(self):
            given["down"] = given.get("down", 0) + 1

    def trainer_init(info, *, client, source):
        given.update(info=info, client=client, source=source)
        return Engine()

    monkeypatch.setattr(WeightTransferTrainerFactory, "trainer_init", trainer_init)
    client = Client()
    publisher = make_publisher(kind, folder, client, rank=1)
    assert given["info"].backend == backend and backend in WeightTransferTrainerFactory._registry
    assert {name: getattr(given["info"], name) for name in fields} == fields
    publisher.publish(12)
    publisher.publish(13)
    assert client.calls == [("finish", "12"), ("finish", "13")]
    publisher.close()
    publisher.close()
    assert given["down"] == 1
    with pytest.raises(RuntimeError, match="after close"):
        publisher.publish(14)


def test_a_tensor_larger_than_the_ipc_buffer_gets_a_larger_one(folder, monkeypatch):
    monkeypatch.setattr(publish, "IPC_BUFFER_BYTES", 1000)
    infos = []
    monkeypatch.setattr(WeightTransferTrainerFactory, "trainer_init", lambda info, **_: infos.append(info))
    make_publisher("ipc", folder, Client())
    largest = max(t.nbytes for t in stored_tensors(folder).values())
    assert infos[0].packed_buffer_size_bytes == largest > 1000


@pytest.mark.parametrize("source", [WireSource, MegatronWeightSource])
def test_sources_have_the_methods_of_vllms_protocol(source):
    for name, method in vars(base.WeightSource).items():
        if not name.startswith("_") or name == "__iter__":
            assert list(inspect.signature(getattr(source, name)).parameters) == list(
                inspect.signature(method).parameters
            )


def test_the_client_has_the_methods_of_vllms_protocol():
    for name, method in vars(base.VLLMWeightSyncClient).items():
        if not name.startswith("_"):
            ours = inspect.signature(getattr(publish.WeightClient, name))
            assert list(ours.parameters) == list(inspect.signature(method).parameters), name


def test_nccl_sends_every_stored_tensor_in_order_under_its_version(folder, monkeypatch):
    """vLLM's real trainer engine, with the network cut off below it."""
    sent = []
    monkeypatch.setattr(nccl_engine, "open_trainer_endpoint", lambda info: object())
    monkeypatch.setattr(
        nccl_engine, "packed_nccl_broadcast_producer", lambda iterator, **_: sent.extend(map(tuple, iterator))
    )
    monkeypatch.setattr(nccl_engine.NCCLTrainerWeightTransferEngine, "_post_send_sync", staticmethod(lambda: None))
    client = Client()
    publisher = make_publisher("nccl", folder, client)
    publisher.publish(5)
    assert [call[0] for call in client.calls] == ["init", "start", "update", "finish"]
    assert client.calls[-1] == ("finish", "5")
    stored = stored_tensors(folder)
    update = client.calls[2][1]
    assert update["names"] == [name for name, _ in sent] and set(update["names"]) == set(stored)
    assert all(torch.equal(t.view(torch.uint8), stored[name].view(torch.uint8)) for name, t in sent)
    assert "float8_e4m3fn" in update["dtype_names"]


def test_ranks_that_do_not_send_take_part_in_gathering(folder, monkeypatch):
    monkeypatch.setattr(nccl_engine.NCCLTrainerWeightTransferEngine, "_post_send_sync", staticmethod(lambda: None))
    passes = []
    original = WireSource.__iter__
    monkeypatch.setattr(
        WireSource, "__iter__", lambda self: (passes.append(name) or (name, t) for name, t in original(self))
    )
    publisher = make_publisher("nccl", folder, None, rank=1)
    publisher.publish(1)
    assert set(passes) == set(stored_tensors(folder))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("family", ["deepseek_v3_fp8", "kimi_k2_thinking"])
def test_a_gpu_quantises_to_the_same_bytes(tmp_path, family):
    made = make(family, tmp_path / family)
    wire = Wire(open_model(made))
    for name, values in FolderSource(made):
        for a, b in zip(wire.encode(name, values * 1.01), wire.encode(name, values.cuda() * 1.01), strict=True):
            assert torch.equal(a.view(torch.uint8), b.cpu().view(torch.uint8)), name

"""Transports by name: what is refused, and that the controller's halves are light."""

from __future__ import annotations

import gc
import multiprocessing
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import HANG_S

from megatron_fleet.config.errors import UserError
from megatron_fleet.weight_sync import vllm_plugin
from megatron_fleet.weight_sync.registry import TRANSPORTS, engine_backend, make_transport

EXAMPLES = Path(__file__).parents[2] / "examples"
OPTIONS = {"gloo": {"address": "127.0.0.1"}, "nccl": {"address": "127.0.0.1"}, "disk": {"url": "versions"}}
FOR_VLLM = [name for name, halves in TRANSPORTS.items() if halves.engine is not None]


@pytest.mark.parametrize("name", TRANSPORTS)
def test_a_transport_is_called_what_the_table_calls_it(name):
    transport = make_transport(name, OPTIONS.get(name))
    assert transport.name == name
    assert transport.lasting == (name in ("shm", "disk", "message"))
    transport.close()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tcp", r"rollout.engine.transport=tcp: there is no such transport; choose auto, shm, cuda_ipc, nccl"),
        ("gloo", r"transport=gloo needs the address"),
        ("nccl", r"transport=nccl needs the address"),
        ("disk", r"transport=disk needs a folder"),
    ],
)
def test_a_mistake_is_a_sentence(name, message):
    with pytest.raises(UserError, match=message):
        make_transport(name)


def test_the_controllers_halves_import_neither_torch_nor_vllm():
    program = (
        "import sys\nfrom megatron_fleet.weight_sync.registry import TRANSPORTS, make_transport\n"
        f"for name in TRANSPORTS: make_transport(name, {OPTIONS!r}.get(name))\nprint(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=HANG_S, check=True)
    assert {name.split(".")[0] for name in done.stdout.split()} & {"torch", "vllm", "ray", "megatron"} == set()


class OneEngine:
    """A receiver that notes what it is told."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, verb):
        async def call(*arguments):
            self.calls.append((verb, *arguments))

        return call


class Describes:
    """A trainer that describes each version of its weights in some messages."""

    def __init__(self, *messages):
        self.messages = messages

    async def prepare_weights(self, transport, options):
        return {"where": transport}

    async def send_weights(self, version, options, deliver):
        for message in self.messages:
            await deliver(message)


async def test_the_message_of_a_trainer_is_what_a_restarted_engine_loads():
    engine, message = OneEngine(), {"address": "x"}
    await make_transport("message").sync(Describes(message), engine, 7)
    last = ("finish_update", 7, message)
    assert engine.calls == [("open_transport", {"where": "message"}), ("begin_update",), ("load", message), last]


@pytest.mark.parametrize("messages", [(), ({}, {})])
async def test_an_update_of_no_or_of_two_messages_is_not_finished(messages):
    engine = OneEngine()
    with pytest.raises(
        RuntimeError, match=rf"^version 7 of the weights was sent in {len(messages)} messages; it must be"
    ):
        await make_transport("message").sync(Describes(*messages), engine, 7)
    assert "finish_update" not in [verb for verb, *_ in engine.calls]


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Transports of the user's own, importable."""
    monkeypatch.syspath_prepend(EXAMPLES)
    (tmp_path / "other_transport.py").write_text("def number(): return 5\n")
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("own")
def test_a_transport_of_ones_own():
    transport = make_transport("my_transport:timed_shm")
    assert type(transport).__name__ == "TimedShm" and transport.lasting
    transport.close()
    with pytest.raises(
        UserError, match=r"^rollout\.engine\.transport=other_transport:number returned int; it must return"
    ):
        make_transport("other_transport:number")


@pytest.mark.usefixtures("own")
def test_vllm_finds_the_engines_half_of_the_runs_own(monkeypatch):
    pytest.importorskip("vllm")
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory as Factory

    monkeypatch.setattr(Factory, "_registry", {})
    monkeypatch.setenv(vllm_plugin.TRANSPORT, "my_transport:timed_shm")
    vllm_plugin.register()
    assert Factory._registry[engine_backend("my_transport:timed_shm")]().__name__ == "ShmEngine"
    monkeypatch.setenv(vllm_plugin.TRANSPORT, "shm")
    vllm_plugin.register()
    assert len(Factory._registry) == len(FOR_VLLM) + 1


def test_a_spawned_engine_process_enables_garbage_collection_again_but_not_of_its_imports(monkeypatch):
    pytest.importorskip("vllm")
    monkeypatch.setattr(multiprocessing, "parent_process", object)
    gc.disable()
    frozen, made = gc.get_freeze_count(), [[] for _ in range(1000)]
    try:
        vllm_plugin.register()
        assert gc.isenabled() and gc.get_freeze_count() >= frozen + len(made)
    finally:
        gc.enable()


def test_vllm_finds_the_engines_half_of_every_transport():
    pytest.importorskip("vllm")
    from vllm.distributed.weight_transfer.base import WeightTransferEngine
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory as Factory
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    for name in FOR_VLLM:
        assert issubclass(Factory._registry[engine_backend(name)](), WeightTransferEngine)

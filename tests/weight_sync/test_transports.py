"""Every transport that works on CPU, between this process and real vLLM engines."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from pathlib import Path

import pytest

transformers = pytest.importorskip("transformers")
pytest.importorskip("vllm")

import torch  # noqa: E402
from engine_process import NEVER_S, EngineProcess, Engines  # noqa: E402
from local_sender import FolderWeights, LocalSender  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from waiting import HANG_S  # noqa: E402
from weight_fixtures import tiny_config  # noqa: E402

from megatron_fleet.config.errors import UserError  # noqa: E402
from megatron_fleet.weight_sync.broadcast import group as update_group  # noqa: E402
from megatron_fleet.weight_sync.registry import make_transport  # noqa: E402

pytestmark = pytest.mark.slow

PROMPTS = [[1, 2, 3], [40, 41, 42, 43, 44, 45], [99, 7]]
TOKENS = 24


def make_model(folder: Path, seed: int):
    """A tied head is stored once; on CPU vLLM keeps a packed copy of it."""
    torch.manual_seed(seed)
    sizes = tiny_config(
        hidden_size=64, head_dim=32, num_attention_heads=4, num_key_value_heads=2, initializer_range=0.3
    )
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes | {"tie_word_embeddings": True}))
    model.save_pretrained(folder)
    return model.eval()


def greedy(model) -> list[list[int]]:
    out = []
    for prompt in PROMPTS:
        ids = list(prompt)
        for _ in range(TOKENS):
            with torch.no_grad():
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        out.append(ids[len(prompt) :])
    return out


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Name → (folder, what transformers says with it)."""
    root = tmp_path_factory.mktemp("models")
    made = {name: (root / name, greedy(make_model(root / name, seed))) for seed, name in enumerate("ab")}
    assert made["a"][1] != made["b"][1]
    return made


@pytest.fixture(scope="module")
def served(models, tmp_path_factory):
    """The folder that engines start from: model ``a``, with frequencies that old transformers versions store. An
    update without them is whole."""
    folder = tmp_path_factory.mktemp("served") / "a"
    shutil.copytree(models["a"][0], folder)
    file = folder / "model.safetensors"
    save_file(load_file(file) | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}, file)
    return folder


@pytest.fixture(scope="module")
def s3_environment(s3_url):
    """Before the engine starts, which then finds the server too."""
    return s3_url


@pytest.fixture(scope="module")
def engine(models, served, s3_environment, tmp_path_factory):
    made = EngineProcess(served, tmp_path_factory.mktemp("engine") / "log")
    assert made.ask("generate", PROMPTS, TOKENS) == models["a"][1]
    yield made
    made.close()


@pytest.fixture
def options(request, tmp_path, s3_environment):
    return {
        "gloo": {"address": "127.0.0.1"},
        "disk": {"url": f"{tmp_path}/versions"},
        "s3": {"url": s3_environment},
    }.get(request.param, {})


def check_says(engine: EngineProcess, said: list[list[int]]) -> None:
    assert engine.ask("generate", PROMPTS, TOKENS) == said, engine.log.read_text()[-3000:]


@pytest.mark.parametrize(
    ("name", "options"), [("shm", "shm"), ("gloo", "gloo"), ("disk", "disk"), ("disk", "s3")], indirect=["options"]
)
async def test_an_engine_says_what_transformers_says_with_the_weights_sent(models, engine, name, options):
    engine.ask("transport", name)
    weights = FolderWeights(models["b"][0])
    sender, engines, transport = LocalSender(weights), Engines(engine), make_transport(name, options)
    await transport.sync(sender, engines, 1)
    assert engines.failures == []
    check_says(engine, models["b"][1])
    weights.folder = models["a"][0]
    await transport.sync(sender, engines, 2)
    check_says(engine, models["a"][1])
    weights.folder = models["b"][0]
    again = Engines(engine)  # one that restarted gets the version alone, and once more
    for _ in range(2):
        await transport.sync(sender, again, 3)
        assert again.version == 3 and again.failures == engines.failures == []
    check_says(engine, models["b"][1])
    assert (again.last_message is not None) == transport.lasting
    if transport.lasting:  # without a trainer
        sender.close()
        await again.begin_update()
        await again.load(again.last_message)
        await again.finish_update(3, None)
        check_says(engine, models["b"][1])
        assert again.failures == []
    transport.close()


async def test_a_trainer_that_fails_in_the_middle_of_a_broadcast_releases_the_engine(models, engine, monkeypatch):
    """It does not wait, and takes the next attempt, in which everything is sent from the start."""
    monkeypatch.setattr("megatron_fleet.weight_sync.buckets.BUCKET_BYTES", 1)
    engine.ask("transport", "gloo")
    weights = FolderWeights(models["a"][0])
    sender, engines = LocalSender(weights), Engines(engine)
    transport = make_transport("gloo", {"address": "127.0.0.1"})
    await transport.sync(sender, engines, 1)
    sent = iter(range(30))

    def fail():
        if next(sent, None) is None:
            raise OSError("the trainer failed")

    weights.before_write = fail
    with pytest.raises((OSError, RuntimeError), match="the trainer failed"):
        await asyncio.wait_for(transport.sync(sender, engines, 2), HANG_S)
    assert engines.failures == [] and engines.version == 1
    with pytest.raises(RuntimeError, match="without all tensors"):
        engine.ask("rpc", "finish_weight_update")
    weights.before_write = None
    await engines.open_transport(await sender.prepare_weights("gloo", {"address": "127.0.0.1"}))
    await asyncio.gather(sender.send_weights(2, {}, engines.load), engines.load({}))
    await engines.finish_update(2, None)
    assert engines.failures == []
    check_says(engine, models["a"][1])


async def test_engines_that_are_left_get_the_version_when_one_is_killed_in_a_broadcast(
    models, served, engine, tmp_path, monkeypatch
):
    monkeypatch.setattr("megatron_fleet.weight_sync.buckets.BUCKET_BYTES", 1)
    monkeypatch.setattr(update_group, "STALL_S", NEVER_S)
    engine.ask("transport", "gloo")
    doomed = EngineProcess(served, tmp_path / "doomed.log", transport="gloo")
    doomed.ask("generate", PROMPTS, 1)
    weights = FolderWeights(models["b"][0])
    sender, engines = LocalSender(weights), Engines(engine, doomed)
    transport = make_transport("gloo", {"address": "127.0.0.1"})
    sent = iter(range(30))

    def kill():
        if next(sent, None) is None:
            os.kill(doomed.process.pid, signal.SIGKILL)
            weights.before_write = None

    weights.before_write = kill
    try:
        await asyncio.wait_for(transport.sync(sender, engines, 5), HANG_S)
    finally:
        doomed.close()
    assert engines.left == [engine] and engines.version == 5
    assert engines.calls == ["open", "begin", "load", "open", "load", "finish"]
    assert sender.calls == ["prepare_weights", "send_weights"] * 2
    check_says(engine, models["b"][1])


async def test_a_version_on_disk_that_is_damaged_is_not_taken(models, engine, tmp_path):
    engine.ask("transport", "disk")
    sender, engines = LocalSender(FolderWeights(models["a"][0])), Engines(engine)
    transport = make_transport("disk", {"url": str(tmp_path)})
    await transport.sync(sender, engines, 1)
    folder = Path(engines.last_message["path"])
    damaged = bytearray((folder / "00000.safetensors").read_bytes())
    damaged[-5] ^= 1
    (folder / "00000.safetensors").write_bytes(damaged)
    engine.ask("rpc", "start_weight_update")
    with pytest.raises(RuntimeError, match=r"00000.safetensors: checksum differs"):
        engine.ask("rpc", "update_weights", {"path": str(folder)})
    engine.ask("rpc", "start_weight_update")
    with pytest.raises(RuntimeError, match=r"manifest.json: there is no such file"):
        engine.ask("rpc", "update_weights", {"path": str(folder.with_name("weights-00000009-00000000"))})
    await transport.sync(sender, engines, 2)
    assert engines.failures == []
    check_says(engine, models["a"][1])


async def test_without_engines_the_trainer_goes_on(models):
    sender, engines = LocalSender(FolderWeights(models["a"][0])), Engines()
    transport = make_transport("gloo", {"address": "127.0.0.1"})
    await asyncio.wait_for(transport.sync(sender, engines, 1), HANG_S)
    assert engines.version == 1


async def test_an_address_of_another_host_is_a_sentence(models):
    sender = LocalSender(FolderWeights(models["a"][0]))
    with pytest.raises(UserError, match=r"192\.0\.2\.1.*cannot listen there"):
        await make_transport("gloo", {"address": "192.0.2.1"}).sync(sender, Engines(), 1)

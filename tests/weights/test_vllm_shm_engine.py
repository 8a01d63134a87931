"""The transfer engine inside vLLM, with a model that only records: what it loads, what it refuses, and when."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from folder_source import FolderSource  # noqa: E402
from tiny_models import make, stored_tensors  # noqa: E402

from megatron_fleet.platform.communicator import Alone  # noqa: E402
from megatron_fleet.weight_sync.publish_shm import ShmPublisher  # noqa: E402
from megatron_fleet.weight_sync.shared_buffer import Board, RoundLost  # noqa: E402
from megatron_fleet.weight_sync.wire import Wire  # noqa: E402
from megatron_fleet.weights import shared_buffer, vllm_shm_engine  # noqa: E402
from megatron_fleet.weights.hf_model import open_model  # noqa: E402


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.loaded: dict[str, torch.Tensor] = {}

    def load_weights(self, weights):
        self.loaded |= {name: tensor.clone() for name, tensor in weights}


class Engine:
    """The client of one transfer engine in this process. ``before`` runs before a verb."""

    def __init__(self, folder) -> None:
        self.engine = object.__new__(vllm_shm_engine.ShmWeightTransferEngine)
        self.engine._memory = self.engine._loaded = None
        self.engine.model, self.engine.device = Model(), torch.device("cpu")
        self.engine.model_config = SimpleNamespace(model=str(folder))
        self.before: dict[str, object] = {}
        self.version: str | None = None

    @property
    def loaded(self):
        return self.engine.model.loaded

    def _verb(self, name):
        self.before.pop(name, lambda: None)()

    def init_weight_transfer_engine(self, info):
        self.engine.init_transfer_engine(vllm_shm_engine.ShmInitInfo(**info))

    def start_weight_update(self):
        self.engine.start_weight_update()

    def update_weights(self, info):
        self._verb("update")
        self.engine.receive_weights(vllm_shm_engine.ShmUpdateInfo(**info))

    def finish_weight_update(self, weight_version=None):
        self._verb("finish")
        self.engine.finish_weight_update()
        self.version = weight_version


@pytest.fixture
def setup(tmp_path, monkeypatch):
    """Folder, engine and publisher of a model in several buckets."""
    monkeypatch.setattr(shared_buffer, "BUCKET_BYTES", 1)
    monkeypatch.setattr(vllm_shm_engine, "initialize_layerwise_reload", lambda model: None)
    monkeypatch.setattr(vllm_shm_engine, "finalize_layerwise_reload", lambda model, config: None)

    def start(family="qwen3"):
        folder = make(family, tmp_path / family)
        engine = Engine(folder)
        return folder, engine, ShmPublisher(FolderSource(folder), engine, Alone(), Wire(open_model(folder)))

    return start


def board_of(engine):
    return Board(engine._memory, len(engine._layout.buckets), engine._layout.writers)


@pytest.mark.parametrize("family", ["qwen3", "kimi_k25", "moonlight"])
def test_all_the_engines_folder_stores_is_loaded_but_what_megatron_has_not(setup, family):
    folder, engine, publisher = setup(family)
    publisher.publish(1)
    stored, carried = stored_tensors(folder), open_model(folder).carried
    assert set(engine.loaded) == set(stored) - set(carried)
    assert (family == "qwen3") == (not carried)
    assert engine.version == "1"


def test_nothing_of_a_bucket_is_loaded_when_its_bytes_changed(setup):
    _, engine, publisher = setup()
    layout = publisher._layout
    victim = layout.buckets[2]

    def tear():
        board_of(engine.engine).wait_complete(1)
        publisher._memory[victim[-1].offset + 1] ^= 1

    engine.before["update"] = tear
    with pytest.raises(ValueError, match="checksum of bucket 2 differs"):
        publisher.publish(1)
    assert set(engine.loaded) == {slot.meta.name for bucket in layout.buckets[:2] for slot in bucket}
    assert engine.version is None
    with pytest.raises(RuntimeError, match="without the tensors of a round"):
        engine.finish_weight_update()
    publisher.publish(1)
    assert len(engine.loaded) == sum(map(len, layout.buckets)) and engine.version == "1"


def test_an_update_that_is_overwritten_before_it_is_complete_fails(setup):
    _, engine, publisher = setup()
    publisher.publish(1)
    engine.start_weight_update()
    engine.update_weights({"round": 1})
    board_of(engine.engine).begin(0, 2)
    with pytest.raises(RoundLost, match="round 1 was overwritten by round 2"):
        engine.finish_weight_update()


def test_a_round_that_the_trainer_gave_up_fails_at_once(setup):
    _, engine, publisher = setup()
    publisher.publish(1)
    board = board_of(engine.engine)
    board.begin(0, 2)
    board.abandon(2)
    engine.start_weight_update()
    with pytest.raises(RoundLost, match="gave round 2 up"):
        engine.update_weights({"round": 2})


def test_an_engine_of_another_model_refuses_before_it_touches_anything(setup, tmp_path):
    _, engine, publisher = setup()
    engine.engine.model_config.model = str(make("qwen2", tmp_path / "other"))
    with pytest.raises(ValueError, match=r"the update lacks 12 tensors, first 'model.layers.0.self_attn.k_proj.bias'"):
        publisher.publish(1)
    assert engine.loaded == {}
    with pytest.raises(RuntimeError, match="before init_weight_transfer_engine"):
        engine.start_weight_update()


def test_an_engine_without_a_checkpoint_takes_what_comes(setup, tmp_path):
    _, engine, publisher = setup()
    engine.engine.model_config.model = str(tmp_path)
    publisher.publish(1)
    assert engine.loaded

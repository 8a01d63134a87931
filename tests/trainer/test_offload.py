"""Training with everything moved away between the steps is training, bit for bit."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import pytest

pytest.importorskip("megatron_fleet.trainer.megatron")

import torch
from policy_fixtures import make_batch, make_config, write_config

from megatron_fleet.algorithms.losses import make_loss
from megatron_fleet.config.errors import UserError
from megatron_fleet.config.schema import AlgorithmConfig
from megatron_fleet.trainer.megatron import offload
from megatron_fleet.trainer.megatron.offload import PARTS, HostCopy, TrainState
from megatron_fleet.trainer.megatron.policy import MegatronPolicy


@pytest.fixture
def make_policy(tmp_path):
    """Builds policies one after the other: the process groups are per process."""
    alive = []

    def make(dtype="float32", **changes):
        while alive:
            alive.pop().close()
        folder = write_config(tmp_path / "model", **changes)
        alive.append(MegatronPolicy(make_config(folder, dtype=dtype), init="random"))
        return alive[-1]

    yield make
    while alive:
        alive.pop().close()


def content(policy) -> dict[str, torch.Tensor]:
    """Every parameter, master parameter and moment."""
    found = dict(policy.model_chunks[0].named_parameters())
    for part in policy._optimizer.chained_optimizers:
        masters = [p for group in part.optimizer.param_groups for p in group["params"]]
        for i, master in enumerate(masters):
            found[f"master {i}"] = master
            found |= {f"{name} {i}": value for name, value in part.optimizer.state[master].items()}
    return {name: tensor.detach().clone() for name, tensor in found.items()}


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def train(policy, between) -> list:
    loss, reports = make_loss(AlgorithmConfig()), []
    for step in range(3):
        micro_batches = [make_batch(count=4, longest=45, seed=step)]
        reports.append((policy.forward_backward(micro_batches, loss), policy.optim_step(1e-3)))
        between()
    return reports


@pytest.mark.parametrize(
    ("dtype", "tied"), [("float32", False), ("float32", True), ("bfloat16", False), ("bfloat16", True)]
)
def test_training_is_the_same_to_the_bit(make_policy, dtype, tied):
    straight = make_policy(dtype, tie_word_embeddings=tied)
    expected = train(straight, lambda: None), content(straight)
    policy = make_policy(dtype, tie_word_embeddings=tied)
    state = policy.train_state()

    def away_and_back():
        state.offload()
        assert set(state.held().values()) == {0}
        state.onload()

    assert train(policy, away_and_back) == expected[0]
    assert_equal(content(policy), expected[1])


def test_parts_move_alone_and_the_rest_stays_usable(make_policy):
    policy = make_policy("bfloat16")
    train(policy, lambda: None)
    state, before = policy.train_state(), content(policy)
    sizes = state.sizes()
    numel = sum(p.numel() for p in policy.model_chunks[0].parameters())
    # bfloat16 parameters, float32 gradients, a float32 master and two moments; buffers are padded a little.
    assert [sizes[part] / numel for part in PARTS] == pytest.approx([2, 4, 12], rel=0.01)
    logprobs = policy.forward([make_batch(count=2)])
    state.offload({"gradients", "optimizer"})
    assert state.held() == {"parameters": sizes["parameters"], "gradients": 0, "optimizer": 0}
    assert state.sizes() == sizes
    assert all((a == b).all() for a, b in zip(logprobs[0], policy.forward([make_batch(count=2)])[0], strict=True))
    state.offload({"parameters"})
    assert set(state.held().values()) == {0}
    state.onload({"optimizer"})
    assert state.held() == {"parameters": 0, "gradients": 0, "optimizer": sizes["optimizer"]}
    state.onload()
    assert state.held() == sizes
    assert_equal(content(policy), before)


def test_gradients_come_back_as_zeros(make_policy):
    policy = make_policy()
    state = policy.train_state()
    policy.forward_backward([make_batch(count=3)], make_loss(AlgorithmConfig()))
    gradients = [p.main_grad for p in policy.model_chunks[0].parameters()]
    assert any(g.any() for g in gradients)
    state.offload({"gradients"})
    state.onload({"gradients"})
    assert not any(g.any() for g in gradients)
    assert policy.optim_step(1e-3).grad_norm == 0


def test_twice_is_once(make_policy):
    policy = make_policy()
    state, before = policy.train_state(), content(policy)
    state.onload()
    for _ in range(2):
        state.offload()
    for _ in range(2):
        state.onload()
    assert_equal(content(policy), before)


def test_frozen_parameters_and_buffers_outside_megatrons_memory_move_too(make_policy):
    policy = make_policy()
    chunk = policy.model_chunks[0]
    state = policy.train_state()
    plain = state.sizes()["parameters"]
    chunk.frozen = torch.nn.Parameter(torch.arange(1000.0), requires_grad=False)
    chunk.register_buffer("kept", torch.arange(500, dtype=torch.int32))
    view = chunk.frozen.data[10:20]
    assert state.sizes()["parameters"] == plain + 4000 + 2000
    state.offload({"parameters"})
    assert state.held()["parameters"] == 0
    state.onload()
    assert chunk.frozen.equal(torch.arange(1000.0))
    assert chunk.kept.equal(torch.arange(500, dtype=torch.int32))
    assert view.tolist() == list(range(10, 20))


def test_memory_that_two_parts_share_moves_once(make_policy):
    """A precision-aware optimizer's parameters are the model's own: they must still be after a cycle."""
    policy = make_policy()
    state = policy.train_state()
    (part,) = policy._optimizer.chained_optimizers
    master = part.optimizer.param_groups[0]["params"][0]
    storages = state.storages()
    assert master.untyped_storage()._cdata in {s._cdata for s in storages["parameters"]}  # float32 trains in place
    addresses = [s._cdata for part in storages.values() for s in part]
    assert len(addresses) == len(set(addresses))
    state.offload()
    state.onload()
    master.data.fill_(7)
    assert any((p == 7).all() for p in policy.model_chunks[0].parameters())


def test_state_loaded_between_two_cycles_is_what_comes_back(make_policy, tmp_path):
    policy = make_policy("bfloat16")
    state = policy.train_state()
    train(policy, lambda: None)
    policy.save_state(tmp_path / "saved")
    expected = content(policy)
    train(policy, lambda: None)
    state.offload()
    state.onload()
    policy.load_state(tmp_path / "saved")
    state.offload()
    state.onload()
    assert_equal(content(policy), expected)


def test_nothing_has_moved_when_host_memory_is_short(make_policy, monkeypatch):
    policy = make_policy()
    state, before = policy.train_state(), content(policy)
    sizes = state.sizes()

    def full(*_):
        raise RuntimeError("out of host memory")

    with monkeypatch.context() as patch:
        patch.setattr(HostCopy, "_block", full)
        with pytest.raises(RuntimeError, match="out of host memory"):
            state.offload()
    assert state.held() == sizes
    state.offload()
    state.onload()
    assert_equal(content(policy), before)


def test_quantised_parameters_are_refused(make_policy):
    class Quantised(torch.Tensor):
        pass

    policy = make_policy()
    chunk = SimpleNamespace(
        module=SimpleNamespace(
            named_parameters=lambda: [("a.weight", SimpleNamespace(data=torch.zeros(2).as_subclass(Quantised)))]
        )
    )
    with pytest.raises(UserError, match=r"colocated=true: a\.weight is stored quantised \(Quantised\)"):
        TrainState([chunk], policy._optimizer)


def test_caches_of_quantised_weights_go_with_the_parameters(make_policy):
    policy = make_policy()
    state = policy.train_state()
    layer = policy.model_chunks[0].decoder
    layer._fp8_workspaces = {"weight": torch.zeros(8)}
    state.offload({"optimizer"})
    assert layer._fp8_workspaces
    state.offload({"parameters"})
    assert not layer._fp8_workspaces


def test_copies_cross_the_borders_of_blocks(monkeypatch):
    monkeypatch.setattr(offload, "BLOCK_BYTES", 64)
    copy = HostCopy(pinned=False)
    for sizes in [(10, 100, 0, 64, 7), (200, 3), (1,)]:  # grows, then is used again
        tensors = [torch.randint(0, 256, (n,), dtype=torch.uint8) for n in sizes]
        expected = [t.clone() for t in tensors]
        copy.store(tensors)
        for tensor in tensors:
            tensor.zero_()
        stretches = [torch.cat([torch.empty(0, dtype=torch.uint8), *parts]) for parts in copy.stretches(sizes)]
        assert all(torch.equal(a, b) for a, b in zip(stretches, expected, strict=True))
        copy.load(tensors)
        assert all(torch.equal(a, b) for a, b in zip(tensors, expected, strict=True))
    assert copy.nbytes == 203  # what the largest needed


def tensor_bytes() -> int:
    """Bytes of all tensors that the garbage collector knows."""
    storages = [made.untyped_storage() for made in gc.get_objects() if issubclass(type(made), torch.Tensor)]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


@pytest.mark.slow
def test_cycles_leak_nothing(make_policy):
    policy = make_policy("bfloat16", num_hidden_layers=1, vocab_size=8191)
    state = policy.train_state()
    micro_batches, loss = [make_batch(count=1, longest=13)], make_loss(AlgorithmConfig())
    sizes, host, alive = [], [], []
    gc.collect()
    gc.freeze()  # what is there already is not looked through at each collection
    for _ in range(12):
        state.onload()
        sizes.append(state.held())
        policy.forward_backward(micro_batches, loss)
        policy.optim_step(1e-4)
        state.offload({"gradients", "optimizer"})
        state.offload()
        host.append(sum(copy.nbytes for copy in state._copies.values()))
        gc.collect()
        alive.append(tensor_bytes())
    gc.unfreeze()
    assert all(size == sizes[0] for size in sizes)
    assert len(set(host)) == 1
    assert alive[2:] == alive[2:3] * 10, alive  # the first cycles make what stays

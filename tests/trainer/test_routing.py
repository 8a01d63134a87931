"""Routing replay: recorded experts are used again, with live scores, and whatever goes wrong with it is noticed."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("megatron_fleet.trainer.megatron")
pytest.importorskip("transformers")

import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_layer import MoELayer
from routing_models import (
    EXPERTS,
    LAYERS,
    LR,
    MICRO_BATCHES,
    MODELS,
    Reference,
    config,
    loss,
    record_anything,
    sequences,
)
from tiny_models import make, stored_tensors

from megatron_fleet.telemetry.metrics import policy_metrics
from megatron_fleet.trainer.megatron import routing
from megatron_fleet.trainer.megatron.policy import MegatronPolicy
from megatron_fleet.trainer.packing.pack import pack_micro_batch


@pytest.fixture(scope="module", params=MODELS)
def folder(request, tmp_path_factory) -> Path:
    return make(request.param, tmp_path_factory.mktemp("models") / request.param, dtype=torch.float32)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory) -> Path:
    return make("qwen3_moe", tmp_path_factory.mktemp("qwen") / "qwen3_moe", dtype=torch.float32)


@pytest.fixture
def policies() -> Iterator[Any]:
    """Builds policies one at a time."""
    opened: list[MegatronPolicy] = []

    def build(folder: Path, **changes: Any) -> MegatronPolicy:
        if opened:
            opened.pop().close()
        opened.append(MegatronPolicy(config(folder, **changes)))
        return opened[-1]

    yield build
    for policy in opened:
        policy.close()


def micro_batches_of(data: list[Any]) -> list[list[Any]]:
    return [[data[i] for i in micro_batch] for micro_batch in MICRO_BATCHES]


def flat(micro_batches: list[list[np.ndarray]]) -> list[np.ndarray]:
    return [array for micro_batch in micro_batches for array in micro_batch]


def gradients(policy: MegatronPolicy) -> dict[str, torch.Tensor]:
    """By the names of the HF folder; of one process, before a step."""
    for chunk in policy.model_chunks:
        for parameter in chunk.parameters():
            parameter.data = parameter.main_grad
    return {name: tensor.clone() for name, tensor in policy.weight_source()}


class Recorder:
    """Stands in a tap's place and keeps what the router chose, call by call."""

    def __init__(self) -> None:
        self.calls: list[torch.Tensor] = []

    def get_replay_topk(self, scores, topk, num_groups, group_topk, choose):
        found = choose(scores, topk, num_groups=num_groups, group_topk=group_topk)
        self.calls.append(found[1].clone())
        return found


def recorded(policy: MegatronPolicy, data: list[Any]) -> list[np.ndarray]:
    """Choices of the policy's own routers for each sequence ``[T, layers, k]``."""
    recorders = {}
    for layer in policy.model_chunks[0].decoder.layers:
        if isinstance(layer.mlp, MoELayer):
            recorders[layer.layer_number - 1] = Recorder()
            tap, layer.mlp.router.router_replay = layer.mlp.router.router_replay, recorders[layer.layer_number - 1]
            layer.mlp.router.tap = tap
    policy.forward([[datum] for datum in data])
    for layer in policy.model_chunks[0].decoder.layers:
        if isinstance(layer.mlp, MoELayer):
            layer.mlp.router.router_replay = layer.mlp.router.tap
    choices = next(iter(recorders.values())).calls[0].shape[1]
    out = [np.zeros((len(datum), LAYERS, choices), np.uint8) for datum in data]
    for number, recorder in recorders.items():
        for sequence, call in zip(out, recorder.calls, strict=True):
            sequence[:, number] = call.numpy()[: len(sequence)]
    return out


def test_a_closed_policy_is_freed(folder):
    policy = MegatronPolicy(config(folder))
    policy.forward_backward(micro_batches_of(sequences()), loss)
    model = weakref.ref(policy.model_chunks[0])
    policy.close()
    del policy
    gc.collect()
    assert model() is None


@pytest.mark.slow
def test_replaying_its_own_choices_changes_nothing(folder, policies):
    data = sequences()
    choices: list[np.ndarray | None] = [None] * len(data)
    runs = []
    for _ in range(2):
        policy = policies(folder)
        for datum, experts in zip(data, choices, strict=True):
            datum.extras = {} if experts is None else {"routing": experts}
        choices = recorded(policy, sequences())
        report = policy.forward_backward(micro_batches_of(data), loss)
        runs.append((report, policy.forward(micro_batches_of(data)), gradients(policy)))
    (live, live_logprobs, live_gradients), (replayed, logprobs, replayed_gradients) = runs
    assert live.metrics["routing_choices"] == 0 and live.loss == replayed.loss
    assert replayed.metrics["routing_choices"] == replayed.metrics["routing_possible"] > 0
    assert replayed.metrics["routing_disagreed"] == 0
    for a, b in zip(flat(live_logprobs), flat(logprobs), strict=True):
        np.testing.assert_array_equal(a, b)
    for name, gradient in live_gradients.items():
        assert torch.equal(gradient, replayed_gradients[name]), name


@pytest.mark.parametrize("recompute", ["none", "full", 2, ["moe"]])
def test_other_choices_train_as_in_transformers(folder, policies, recompute):
    data = sequences()
    record_anything(data, MODELS[folder.name])
    reference = Reference(folder)
    with torch.no_grad():
        expected = [reference.logprobs(datum).numpy() for datum in data]
        live = [reference.logprobs(datum).numpy() for datum in sequences()]
    reference.disagreed = 0
    value = reference.train(data)

    policy = policies(folder, recompute=recompute)
    micro_batches = micro_batches_of(data)
    got = {
        i: x
        for micro_batch, values in zip(MICRO_BATCHES, policy.forward(micro_batches), strict=True)
        for i, x in zip(micro_batch, values, strict=True)
    }
    for i, logprobs in enumerate(expected):
        np.testing.assert_allclose(got[i], logprobs, atol=1e-4)
        if "routing" in data[i].extras:
            assert np.abs(live[i] - logprobs).max() > 1e-2  # the experts make a difference that would be seen
    report = policy.forward_backward(micro_batches, loss)
    assert report.loss == pytest.approx(value, rel=1e-5)
    assert report.metrics["routing_disagreed"] == reference.disagreed > 0

    theirs = {name: p.grad for name, p in reference.model.named_parameters()}
    ours = gradients(policy)
    gates = [name for name in ours if name.endswith("mlp.gate.weight")]
    assert len(gates) >= 3
    for name in gates:
        scale = theirs[name].abs().max()
        assert scale > 1e-6
        assert (ours[name] - theirs[name]).abs().max() < 1e-3 * scale, name
    for name in ("model.embed_tokens.weight", "model.layers.1.input_layernorm.weight"):
        assert (ours[name] - theirs[name]).abs().max() < 1e-3 * theirs[name].abs().max(), name


def test_metrics_say_how_much_was_replayed_and_how_often_the_router_disagrees(qwen, policies):
    data = sequences()
    record_anything(data, 3)
    policy = policies(qwen)
    report = policy.forward_backward(micro_batches_of(data), loss)
    step = policy.optim_step(LR)
    experts = [d.extras["routing"] for d in data if "routing" in d.extras]
    recorded = sum(int((e[..., 0] != e[..., 1]).sum()) for e in experts)
    tokens = sum(len(d) for d in data)
    got = policy_metrics([report], [step])
    assert got["policy/routing_replayed"] == pytest.approx(recorded / (tokens * LAYERS))
    share = report.metrics["routing_disagreed"] / (3 * recorded)
    assert got["policy/routing_disagreement"] == pytest.approx(share) and 0.4 < share < 0.8  # 5/8 by chance
    again = policy.forward_backward(micro_batches_of(data), loss)
    assert again.metrics["routing_choices"] == report.metrics["routing_choices"]  # counters start anew


def test_without_a_record_there_is_no_disagreement_to_tell(qwen, policies):
    policy = policies(qwen)
    report = policy.forward_backward(micro_batches_of(sequences()), loss)
    got = policy_metrics([report], [policy.optim_step(LR)])
    assert got["policy/routing_replayed"] == 0 and "policy/routing_disagreement" not in got


def test_other_experts_than_recorded_are_noticed(qwen, policies, monkeypatch):
    data = sequences()
    record_anything(data, 3)
    policy = policies(qwen)
    honest = routing.RouterTap.get_replay_topk

    def stubborn(self, scores, topk, num_groups, group_topk, choose):
        honest(self, scores, topk, num_groups, group_topk, choose)
        return choose(scores, topk, num_groups=num_groups, group_topk=group_topk)

    monkeypatch.setattr(routing.RouterTap, "get_replay_topk", stubborn)
    with pytest.raises(RuntimeError, match="with other experts than recorded"):
        policy.forward_backward(micro_batches_of(data), loss)


def test_a_router_that_was_not_asked_is_noticed(qwen, policies):
    data = sequences()
    record_anything(data, 3)
    policy = policies(qwen)
    policy.model_chunks[0].decoder.layers[2]._forward_pre_hooks.clear()
    with pytest.raises(RuntimeError, match="routing replay failed: of"):
        policy.forward_backward(micro_batches_of(data), loss)


def test_experts_that_repeat_in_part_are_noticed(qwen, policies):
    data = sequences()
    record_anything(data, 3)
    data[0].extras["routing"][5, 1] = [4, 2, 2]
    policy = policies(qwen)
    with pytest.raises(RuntimeError, match="1 of them with other experts"):
        policy.forward_backward(micro_batches_of(data), loss)


def test_routing_of_another_model_is_refused(qwen, policies):
    policy = policies(qwen)
    for change, message in (
        (lambda r: r[1:], "a sequence of 47 tokens with the experts of 46"),
        (lambda r: r[:, :3], r"layers × choices \(3, 3\)"),
        (lambda r: r[..., :2], r"layers × choices \(4, 2\)"),
        (lambda r: np.where(r == 7, 8, r).astype(np.uint8), "expert 8; the model has 8"),
    ):
        data = sequences()
        record_anything(data, 3)
        data[0].extras["routing"] = change(data[0].extras["routing"])
        with pytest.raises(ValueError, match=message):
            policy.forward(micro_batches_of(data))


def test_wide_ids_are_replayed_as_narrow_ones(qwen, policies):
    data = sequences()
    record_anything(data, 3)
    policy = policies(qwen)
    narrow = policy.forward(micro_batches_of(data))
    for datum in data:
        datum.extras = {name: experts.astype(np.int16) for name, experts in datum.extras.items()}
    for a, b in zip(flat(narrow), flat(policy.forward(micro_batches_of(data))), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_micro_batch_brings_its_experts_to_the_places_of_its_tokens(qwen, policies):
    data = sequences()
    record_anything(data, 3)
    chunk = policies(qwen).model_chunks[0]
    micro_batch = pack_micro_batch([data[1], data[2], data[4]], 96, sequence_align=4)
    here = torch.tensor([41, 3, 90, 70])
    experts = routing.micro_batch_experts(micro_batch, chunk, here, torch.device("cpu"))
    assert sorted(experts) == [1, 2, 3, 4]
    start = 40 + 32  # of the third sequence: 38 and 29 tokens before it, aligned
    for number, chosen in experts.items():
        assert chosen.tolist()[1] == data[1].extras["routing"][3, number - 1].tolist()
        assert chosen.tolist()[0] == chosen.tolist()[2] == [0, 0, 0]
    experts = routing.micro_batch_experts(micro_batch, chunk, torch.tensor([start + 6]), torch.device("cpu"))
    assert experts[2].tolist() == [data[4].extras["routing"][6, 1].tolist()]
    assert routing.micro_batch_experts(pack_micro_batch([data[2]], 96), chunk, None, torch.device("cpu")) is None


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_biases_of_experts_move_towards_equal_load(tmp_path, policies, recompute):
    """DeepSeek-V3, arXiv:2412.19437 §2.1.2: by the rate, up for experts with less than the mean load."""
    folder = make("deepseek_v3", tmp_path / "deepseek_v3", dtype=torch.float32)
    data = sequences()
    record_anything(data, 2, whole=True)
    rate = 0.01
    policy = policies(folder, recompute=recompute, bias_update_rate=rate)
    policy.forward(micro_batches_of(data))  # without gradients: not counted
    policy.forward_backward(micro_batches_of(data), loss)
    policy.optim_step(LR)
    before = stored_tensors(folder)
    after = dict(policy.weight_source())
    for number in range(1, LAYERS):
        name = f"model.layers.{number}.mlp.gate.e_score_correction_bias"
        load = sum(np.bincount(d.extras["routing"][:, number].ravel(), minlength=EXPERTS) for d in data)
        moved = rate * np.sign(load.mean() - load)
        np.testing.assert_allclose(after[name].numpy(), before[name].float().numpy() + moved, atol=1e-6)


def test_biases_stay_by_default_and_routers_compute_in_the_type_asked_for(tmp_path, policies):
    folder = make("deepseek_v3", tmp_path / "deepseek_v3", dtype=torch.float32)
    kinds = set()
    policy = policies(folder, dtype="float64")
    for layer in policy.model_chunks[0].decoder.layers[1:]:
        gating = layer.mlp.router.gating
        layer.mlp.router.gating = lambda x, gating=gating: (out := gating(x), kinds.add(out.dtype))[0]
    policy.forward_backward(micro_batches_of(sequences()), loss)
    policy.optim_step(LR)
    assert kinds == {torch.float64}
    before, after = stored_tensors(folder), dict(policy.weight_source())
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert torch.equal(before[name].float(), after[name].float())
    assert parallel_state.get_tensor_model_parallel_world_size() == 1

"""Gradient metrics: their definitions, and one process against gradients of transformers' model."""

from __future__ import annotations

import math
import random
import statistics

import pytest

pytest.importorskip("megatron_fleet.trainer.megatron")
transformers = pytest.importorskip("transformers")

import numpy as np  # noqa: E402
import torch  # noqa: E402
from gradient_runs import configure, measure, micro_batches_of  # noqa: E402

from megatron_fleet.config.errors import UserError  # noqa: E402
from megatron_fleet.config.schema import Config  # noqa: E402
from megatron_fleet.config.validate import check  # noqa: E402
from megatron_fleet.telemetry.metrics import policy_metrics  # noqa: E402
from megatron_fleet.telemetry.registry import METRICS  # noqa: E402
from megatron_fleet.trainer.base import LossReport, OptimReport  # noqa: E402
from megatron_fleet.trainer.gradient_metrics import (  # noqa: E402
    SampledMatrix,
    Sums,
    choose,
    diversity,
    effective_rank,
    gradient_metrics,
    megabytes_edited,
    signal_to_noise,
)
from megatron_fleet.trainer.megatron.policy import MegatronPolicy  # noqa: E402


def sums(gradients):
    """Sums of micro-batches' gradients ``[n, rows, columns]``."""
    return Sums(gradients.sum(0).double(), float(gradients.double().square().sum()), len(gradients))


def draw(mean, n, times=400, elements=50):
    torch.manual_seed(3)
    return [torch.randn(n, 1, elements) + mean for _ in range(times)]


@pytest.mark.parametrize("n", [2, 5, 40])
def test_noise_has_no_signal_however_many_micro_batches(n):
    found = [signal_to_noise(sums(g)) for g in draw(0.0, n)]
    # The mean of F with (50, 50 (n − 1)) degrees of freedom is a little above 1.
    bias = 2 / (50 * (n - 1) - 2)
    assert statistics.mean(found) == pytest.approx(bias, abs=4 * statistics.stdev(found) / 20)


def test_the_signal_is_that_of_the_sum_however_it_is_cut():
    """64 micro-batches with mean 0.5 and variance 1: ‖E Σg‖² / Var Σg = (64 · 0.5)² / 64."""
    for micro_batches_each in (1, 4, 16):
        cut = [g.unflatten(0, (-1, micro_batches_each)).sum(1) for g in draw(0.5, 64)]
        found = statistics.mean(signal_to_noise(sums(g)) for g in cut)
        assert found == pytest.approx(16, rel=0.05), micro_batches_each


def test_one_micro_batch_or_equal_micro_batches_tell_no_noise():
    one = torch.ones(1, 3, 3)
    assert signal_to_noise(sums(one)) is None
    assert signal_to_noise(sums(one.expand(7, 3, 3) / 3)) is None
    assert set(gradient_metrics([sums(one)])) == {"update_diversity", "effective_rank"}


def test_what_has_no_gradient_is_left_out():
    dead, alive = sums(torch.zeros(3, 4, 4)), sums(torch.randn(3, 4, 4, generator=torch.Generator().manual_seed(0)))
    assert gradient_metrics([dead, alive]) == gradient_metrics([alive])
    assert gradient_metrics([dead]) == {}


def test_effective_rank_of_matrices_whose_rank_is_known():
    torch.manual_seed(0)
    left, _ = torch.linalg.qr(torch.randn(20, 12).double())
    right, _ = torch.linalg.qr(torch.randn(12, 12).double())
    for rank in (1, 3, 12):
        assert effective_rank(left[:, :rank] @ right[:rank]) == pytest.approx(rank / 12)
        assert effective_rank(left[:, :rank] @ right[:rank] * 1e-9) == pytest.approx(rank / 12)
    assert effective_rank(left * torch.tensor([1.0, *[0.01] * 11])) < 2.5 / 12


def test_diversity_is_of_sizes_relative_to_the_largest():
    spread = torch.arange(0.05, 1, 0.1)
    assert diversity([spread]) == pytest.approx(1)
    assert diversity([-7 * spread, 1e-3 * spread]) == pytest.approx(1)
    assert diversity([torch.full((5,), -2.0)]) == 0
    half = torch.tensor([1.0, 0.0, 1.0, 0.0])
    assert diversity([half]) == pytest.approx(math.log(2) / math.log(10))


def test_megabytes_are_of_the_whole_model():
    small, large = SampledMatrix("a", (0,), (2**10, 2**10)), SampledMatrix("b", (0,), (2**10, 3 * 2**10))
    # 1/2 of a quarter and 1/4 of the rest of 100 Mi weights.
    assert megabytes_edited({small: 0.5, large: 0.25}, 100 * 2**20)["megabytes_edited"] == pytest.approx(62.5)


def test_samples_are_spread_over_kinds_and_the_stack():
    matrices = [SampledMatrix("qkv", (n,), (8, 8)) for n in range(40)] + [
        SampledMatrix("router", (n,), (4, 8)) for n in range(2)
    ]
    matrices += [SampledMatrix("fc1", (n, e), (8, 8)) for n in range(40) for e in range(6)]
    found = choose(matrices, 12)
    shuffled = random.Random(1).sample(matrices, len(matrices))
    assert choose(shuffled, 12) == found
    by_kind = {kind: [m.place for m in found if m.kind == kind] for kind in ("qkv", "router", "fc1")}
    assert {kind: len(places) for kind, places in by_kind.items()} == {"qkv": 5, "router": 2, "fc1": 5}
    assert [place[0] // 8 for place in by_kind["qkv"]] == [0, 1, 2, 3, 4]
    assert [place[0] // 8 for place in by_kind["fc1"]] == [0, 1, 2, 3, 4]
    assert len({place[1] for place in by_kind["fc1"]}) > 1
    assert len(set(choose(matrices, 1000))) == len(matrices)


def test_the_rows_and_columns_of_a_sample_are_all_over_the_matrix():
    rows, cols = SampledMatrix("a", (3,), (1000, 40)).lines()
    assert len(set(rows)) == 64 and rows == sorted(rows) and rows[0] < 100 and rows[-1] > 900
    assert cols == list(range(40))
    assert SampledMatrix("a", (4,), (1000, 40)).lines()[0] != rows


@pytest.fixture
def start(tmp_path):
    alive = []

    def make(**settings):
        while alive:
            alive.pop().close()
        tree = configure(tmp_path / "dense", "dense", "single").model_dump()
        tree["policy"]["gradient_metrics"] |= settings
        alive.append(MegatronPolicy(Config.model_validate(tree), init="random"))
        return alive[-1]

    yield make
    while alive:
        alive.pop().close()


def weighted(x):
    return -(x.scaled_advantages * x.logprobs).sum(), {}


def reference_gradients(folder, micro_batches):
    """Name of a Megatron matrix → ``[micro-batches, rows, columns]``, by transformers and plain autograd."""
    hf = transformers.Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found = {}
    for micro_batch in micro_batches:
        hf.zero_grad()
        for datum in micro_batch:
            tokens = torch.from_numpy(datum.token_ids).long()[None]
            logp = (hf(tokens).logits[0, :-1] / 0.8).log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]
            (-(torch.from_numpy(datum.scaled_advantages)[1:] * logp).sum()).backward()
        for number, layer in enumerate(hf.model.layers):
            attention, mlp = layer.self_attn, layer.mlp
            q, k, v = (p.weight.grad.view(2, -1, 64) for p in (attention.q_proj, attention.k_proj, attention.v_proj))
            for name, gradient in (
                ("self_attention.linear_qkv", torch.cat([q, k, v], 1).flatten(0, 1)),
                ("self_attention.linear_proj", attention.o_proj.weight.grad),
                ("mlp.linear_fc1", torch.cat([mlp.gate_proj.weight.grad, mlp.up_proj.weight.grad])),
                ("mlp.linear_fc2", mlp.down_proj.weight.grad),
            ):
                found.setdefault((f"decoder.layers.{name}.weight", (number,)), []).append(gradient.clone())
    return {key: torch.stack(gradients) for key, gradients in found.items()}


def test_one_process_measures_what_plain_autograd_gives(start, tmp_path):
    policy, micro_batches = start(), micro_batches_of(0, 1)
    policy.export_hf(tmp_path / "hf")
    expected = reference_gradients(tmp_path / "hf", micro_batches[:-1])
    before = {id(p): p.detach().clone() for p in policy.model_chunks[0].parameters()}
    metrics, found = measure(policy, micro_batches, weighted)
    assert len(found) == 9 and {len(m.place) for m in found} == {1}
    assert {m.kind for m in found} == {kind for kind, _ in expected}
    ratios, ranks, sizes = [], [], []
    for matrix, sample in found.items():
        r, c = matrix.lines()
        g = expected[matrix.kind, matrix.place][:, r][:, :, c].double().numpy()
        total = g.sum(0)
        np.testing.assert_allclose(sample.total.numpy(), total, rtol=1e-3, atol=1e-4 * np.abs(total).max())
        assert sample.count == 4 and sample.energy == pytest.approx((g**2).sum(), rel=1e-4)
        ratios.append((total**2).sum() / (4 * g.var(0, ddof=1).sum()) - 1)
        p = np.linalg.svd(total, compute_uv=False)
        p /= p.sum()
        ranks.append(np.exp(-(p * np.log(p)).sum()) / min(total.shape))
        sizes.append((np.abs(total) / np.abs(total).max()).ravel())
    counts, _ = np.histogram(np.concatenate(sizes), 10, (0, 1))
    share = counts[counts > 0] / counts.sum()
    assert metrics["snr"] == pytest.approx(np.mean(ratios), rel=1e-3)
    assert metrics["effective_rank"] == pytest.approx(np.mean(ranks), rel=1e-3)
    assert metrics["update_diversity"] == pytest.approx(-(share * np.log(share)).sum() / np.log(10), abs=2e-3)
    layers = [p for n, p in policy.model_chunks[0].named_parameters() if "layers." in n and p.ndim == 2]
    changed = [(p.bfloat16() != before[id(p)].bfloat16()).float().mean().item() for p in layers]
    weights = sum(p.numel() for p in layers)
    exact = sum(p.numel() * part for p, part in zip(layers, changed, strict=True)) * 2 / 2**20
    assert 0.05 < exact / (weights * 2 / 2**20) < 1
    assert metrics["megabytes_edited"] == pytest.approx(exact, rel=0.03)


def test_matrices_of_experts_are_measured_as_others(tmp_path):
    """Their samples count the same micro-batches, and their sums are those of the gradient buffers."""
    tree = configure(tmp_path / "sparse", "sparse", "single").model_dump()
    tree["policy"]["gradient_metrics"] |= {"parameters": 30}
    policy, micro_batches = MegatronPolicy(Config.model_validate(tree), init="random"), micro_batches_of(0, 1)
    try:
        policy.forward_backward(micro_batches, weighted)
        whole = {n: p.main_grad.double().numpy() for n, p in policy.model_chunks[0].named_parameters()}
        whole = {name: values.copy() for name, values in whole.items()}
        policy.discard_gradients()
        metrics, found = measure(policy, micro_batches, weighted)
    finally:
        policy.close()
    experts = [matrix for matrix in found if len(matrix.place) == 2]
    assert 5 < len(experts) < len(found) == 30 and metrics["snr"] > -1
    for matrix, sample in found.items():
        name = matrix.kind.replace("layers.", f"layers.{matrix.place[0]}.")
        name = name.replace("experts.experts.", f"experts.local_experts.{matrix.place[-1]}.")
        r, c = matrix.lines()
        expected = whole[name][r][:, c]
        np.testing.assert_allclose(sample.total.numpy(), expected, rtol=1e-3, atol=1e-4 * np.abs(expected).max())
        assert sample.count == 4 and sample.energy > 0


@pytest.mark.slow
def test_measuring_changes_nothing_and_happens_when_due(start):
    micro_batches = micro_batches_of(0, 1)

    def train(policy):
        found = [measure(policy, micro_batches, weighted)[0] for _ in range(4)]
        return found, [p.detach().clone() for p in policy.model_chunks[0].parameters()]

    watched, parameters = train(start(every=3))
    assert [bool(metrics) for metrics in watched] == [True, False, False, True]
    policy = start(every=0)
    assert policy._probe is None
    for _ in range(4):
        policy.forward_backward(micro_batches, weighted)
        assert policy.optim_step(1e-3).gradient == {}
    for one, two in zip(parameters, policy.model_chunks[0].parameters(), strict=True):
        assert torch.equal(one, two)


def test_several_passes_are_one_update_and_a_skipped_one_tells_nothing(start):
    micro_batches, policy = micro_batches_of(0, 1), start()
    whole = measure(policy, micro_batches, weighted)[0]
    policy = start()
    policy.forward_backward(micro_batches[:3], weighted)
    parts = measure(policy, micro_batches[3:], weighted)[0]
    assert parts == pytest.approx(whole, rel=1e-5)
    policy.forward_backward(micro_batches, weighted)
    assert policy.optim_step(1e-3, hold_above=0.0).gradient == {}
    policy.discard_gradients()
    assert not any(p._backward_hooks for p in policy.model_chunks[0].parameters())
    again = measure(policy, micro_batches, weighted)[1]
    assert {sample.count for sample in again.values()} == {4}


def test_they_are_told_under_the_names_that_the_docs_have():
    steps = [OptimReport(1.0, 1e-3, skipped=False, gradient=g) for g in ({"snr": 1.0}, {}, {"snr": 4.0})]
    names = ("snr", "update_diversity", "effective_rank", "megabytes_edited")
    steps.append(OptimReport(1.0, 1e-3, skipped=False, gradient=dict.fromkeys(names, 1.0)))
    told = policy_metrics([LossReport(loss=0.0)] * 4, steps)
    assert told["policy/grad:snr"] == 2 and told["policy/grad:effective_rank"] == 1
    for name in names:
        assert any(metric.matches(f"policy/grad:{name}") for metric in METRICS)
    assert not [key for key in policy_metrics([LossReport(loss=0.0)], steps[1:2]) if "grad:" in key]


def test_weights_that_are_stored_in_fp8_are_refused(tmp_path):
    tree = configure(tmp_path, "dense", "single").model_dump()
    tree["model"]["dtype"] = "bfloat16"
    tree["precision"] |= {"recipe": "fp8_tensorwise", "fp8_param_gather": True}
    with pytest.raises(UserError, match=r"policy\.gradient_metrics\.every=1 with precision\.fp8_param_gather=true"):
        check(Config.model_validate(tree))

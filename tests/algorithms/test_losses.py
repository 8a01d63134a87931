"""Loss around the policy term: KL, entropy, the single-forward identity, cross-entropy, metrics."""

import math
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from megatron_fleet.algorithms.loss_metrics import finalize_metrics  # noqa: E402
from megatron_fleet.algorithms.losses import LossInputs, make_loss, sft_loss  # noqa: E402
from megatron_fleet.config.schema import AlgorithmConfig  # noqa: E402

N = 64


def inputs(proximal: bool = True, reference: bool = False, dtype: "torch.dtype" = torch.float64) -> LossInputs:
    """Random tokens whose ratios fall on all sides of the clip bounds."""
    g = torch.Generator().manual_seed(7)

    def normal(scale: float) -> torch.Tensor:
        return scale * torch.randn(N, generator=g, dtype=dtype)

    logprobs = -2 + normal(1)
    return LossInputs(
        logprobs=logprobs.clone().requires_grad_(),
        entropy=normal(1).abs(),
        loss_scale=torch.full((N,), 1 / N, dtype=dtype),
        scaled_advantages=normal(1) / N,
        behaviour=logprobs + normal(0.01),
        sequence=torch.zeros(N, dtype=torch.int64),
        sequences=1,
        arrays={
            **({"proximal": logprobs + normal(0.6)} if proximal else {}),
            **({"reference": logprobs + normal(0.6)} if reference else {}),
        },
    )


@pytest.mark.parametrize("dual_clip", [None, 1.5])
@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_gradients_equal_finite_differences(dual_clip, estimator):
    x = inputs(reference=True)
    loss = make_loss(AlgorithmConfig(dual_clip=dual_clip, kl={"coef": 0.3, "estimator": estimator}))

    def value(logprobs: torch.Tensor) -> torch.Tensor:
        return loss(replace(x, logprobs=logprobs))[0]

    assert torch.autograd.gradcheck(value, x.logprobs)


def test_single_forward_is_plain_policy_gradient_with_ratio_exactly_one():
    x = inputs(proximal=False, dtype=torch.float32)
    loss, sums = make_loss(AlgorithmConfig(dual_clip=3.0))(x)
    loss.backward()
    assert loss.item() == pytest.approx(-x.scaled_advantages.sum().item(), abs=1e-6)
    assert torch.equal(
        x.logprobs.grad, -x.scaled_advantages
    )  # neither min nor clamp may halve or drop a gradient at ratio 1
    assert sums["ratio"] == N
    assert sums["clipped_low"] == sums["clipped_high"] == sums["clipped_dual"] == 0


def test_single_forward_equals_a_separate_pass_with_the_same_weights():
    single, separate = inputs(proximal=False), inputs(proximal=False)
    separate.arrays["proximal"] = separate.logprobs.detach().clone()
    results = [make_loss(AlgorithmConfig())(x) for x in (single, separate)]
    for x, (loss, _) in zip((single, separate), results, strict=True):
        loss.backward()
        assert torch.equal(x.logprobs.grad, single.logprobs.grad)
    assert results[0][0] == results[1][0]


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_kl_term_is_added_and_has_a_gradient(estimator):
    plain, with_kl = inputs(reference=True), inputs(reference=True)
    without, _ = make_loss(AlgorithmConfig())(plain)
    total, sums = make_loss(AlgorithmConfig(kl={"coef": 0.5, "estimator": estimator}))(with_kl)
    without.backward()
    total.backward()
    assert total.item() == pytest.approx(without.item() + 0.5 * sums["kl"].item() / N)
    difference = with_kl.logprobs.grad - plain.logprobs.grad
    d = (with_kl.logprobs - with_kl.reference).detach()
    per_token = 1 - torch.exp(-d) if estimator == "k3" else d
    torch.testing.assert_close(difference, 0.5 * per_token / N)


def test_clamped_tokens_of_k3_are_counted():
    x = inputs(reference=True)
    x.reference[:3] = x.logprobs[:3].detach() + torch.tensor([-12.0, 2.7, 2.5])  # π rose by 12, fell by 2.7 and 2.5
    sums = make_loss(AlgorithmConfig(kl={"coef": 0.5}))(x)[1]
    metrics = finalize_metrics({name: value.item() for name, value in sums.items()})
    assert metrics["policy/policy_kl_clamped"] == 2 / N
    assert "kl_clamped" not in make_loss(AlgorithmConfig(kl={"coef": 0.5, "estimator": "k2"}))(x)[1]


def test_the_entropy_bonus_has_a_gradient_through_the_entropy_alone():
    plain, with_bonus = inputs(), inputs()
    with_bonus.entropy.requires_grad_()
    without, sums_without = make_loss(AlgorithmConfig())(plain)
    total, sums = make_loss(AlgorithmConfig(entropy_coef=0.25))(with_bonus)
    without.backward()
    total.backward()
    mean = sum(with_bonus.entropy.tolist()) / N
    assert total.item() == pytest.approx(without.item() - 0.25 * mean)
    assert sums["entropy_loss"].item() == pytest.approx(-0.25 * mean)
    assert sums["policy_loss"] == without and "entropy_loss" not in sums_without
    torch.testing.assert_close(with_bonus.entropy.grad, torch.full((N,), -0.25 / N, dtype=torch.float64))
    assert torch.equal(with_bonus.logprobs.grad, plain.logprobs.grad)
    metrics = finalize_metrics({name: value.item() for name, value in sums.items()})
    assert metrics["policy/entropy_loss"] == sums["entropy_loss"]


def test_clip_metrics_are_shares_of_tokens():
    x = inputs()
    sums = make_loss(AlgorithmConfig(dual_clip=1.5))(x)[1]
    metrics = finalize_metrics({name: value.item() for name, value in sums.items()})
    sides = [metrics[f"policy/ppo_clip_ratio_{side}"] for side in ("low", "high", "dual")]
    ratios, advantages = (x.logprobs - x.proximal).exp(), x.scaled_advantages
    by_hand = [
        ((ratios < 0.8) & (advantages < 0)).double().mean().item(),
        ((ratios > 1.2) & (advantages > 0)).double().mean().item(),
        ((ratios > 1.5) & (advantages < 0)).double().mean().item(),
    ]
    assert sides == pytest.approx(by_hand) and all(sides)
    assert metrics["policy/ppo_clip_ratio"] == pytest.approx(sum(sides))
    assert metrics["policy/ratio_mean"] == pytest.approx(ratios.mean().item())


def test_mismatch_metrics_by_hand():
    pi, mu = torch.tensor([0.5, 0.2]), torch.tensor([0.4, 0.4])
    one = torch.ones(2)
    _, sums = make_loss(AlgorithmConfig())(LossInputs(pi.log(), one, one, one, mu.log(), one.long(), 2))
    metrics = finalize_metrics({name: value.item() for name, value in sums.items()})
    assert metrics["policy/mismatch_kl_k1"] == pytest.approx((math.log(0.4 / 0.5) + math.log(0.4 / 0.2)) / 2, rel=1e-5)
    assert metrics["policy/mismatch_kl"] == pytest.approx(
        (1.25 - 1 - math.log(1.25) + 0.5 - 1 - math.log(0.5)) / 2, rel=1e-5
    )
    assert metrics["policy/rollout_train_prob_diff_mean"] == pytest.approx((0.8 + 2.0) / 2, rel=1e-6)
    assert metrics["policy/rollout_train_prob_diff_std"] == pytest.approx((mu / pi).std().item(), rel=1e-5)
    assert metrics["policy/policy_entropy"] == 1


def test_a_log_prob_that_is_not_a_number_is_left_out_of_the_mismatch_and_counted():
    x = inputs()
    behaviour = x.behaviour.clone()
    behaviour[0] = math.nan
    kept = {
        name: value[1:]
        for name in ("logprobs", "behaviour", "scaled_advantages", "entropy", "loss_scale")
        if (value := getattr(x, name)) is not None
    }
    kept["arrays"] = {"proximal": x.proximal[1:]}

    def metrics(given: LossInputs) -> dict[str, float]:
        _, sums = make_loss(AlgorithmConfig())(given)
        found = finalize_metrics({name: value.item() for name, value in sums.items()})
        return {name: value for name, value in found.items() if "mismatch" in name or "rollout_train" in name}

    without, broken = metrics(replace(x, **kept)), metrics(replace(x, behaviour=behaviour))
    assert len(broken) == 5 and broken.pop("policy/mismatch_unknown_tokens") == 1
    assert without.pop("policy/mismatch_unknown_tokens") == 0
    assert broken == pytest.approx(without, rel=1e-5)
    assert metrics(replace(x, behaviour=behaviour * math.nan)) == {"policy/mismatch_unknown_tokens": len(behaviour)}


def test_a_tiny_spread_of_the_mismatch_survives_float32():
    n = 10_000
    mu = torch.full((n,), -1.0)
    pi = mu + 1e-4 * torch.tensor([1.0, -1.0]).repeat(n // 2)
    one = torch.ones(n)
    _, sums = make_loss(AlgorithmConfig())(LossInputs(pi, one, one, one, mu, one.long(), 2))
    metrics = finalize_metrics({name: value.item() for name, value in sums.items()})
    assert metrics["policy/rollout_train_prob_diff_std"] == pytest.approx(1e-4, rel=2e-3)
    assert metrics["policy/mismatch_kl"] == pytest.approx(0.5e-8, rel=0.2)


def test_sft_is_cross_entropy():
    logits = torch.randn(5, 11, generator=torch.Generator().manual_seed(1), requires_grad=True)
    tokens = torch.tensor([3, 0, 10, 7, 7])
    logprobs = torch.log_softmax(logits, -1)[torch.arange(5), tokens]
    fifth, zero = torch.full((5,), 0.2), torch.zeros(5)
    loss, sums = sft_loss(LossInputs(logprobs, zero, fifth, fifth, zero, zero.long(), 1))
    assert loss.item() == pytest.approx(torch.nn.functional.cross_entropy(logits, tokens).item(), rel=1e-6)
    assert finalize_metrics({k: v.item() for k, v in sums.items()})["policy/nll"] == pytest.approx(loss.item())


def test_no_trained_token_has_no_means():
    assert finalize_metrics({"tokens": 0.0, "entropy": 0.0}) == {}

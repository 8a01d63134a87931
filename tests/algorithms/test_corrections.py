"""Corrections against loops written from their definitions, and their metrics by hand."""

import math

import pytest

torch = pytest.importorskip("torch")

from loss_fixtures import Sample, gradients, normalisers, pack, samples  # noqa: E402

from megatron_fleet.algorithms.corrections import CORRECTIONS, correction_weights  # noqa: E402
from megatron_fleet.algorithms.loss_metrics import finalize_metrics  # noqa: E402
from megatron_fleet.algorithms.losses import make_loss  # noqa: E402
from megatron_fleet.config.schema import CORRECTION_BOUNDS, AlgorithmConfig, CorrectionConfig  # noqa: E402


def weights_by_definition(s: Sample, kind: str, low: float, high: float) -> list[float]:
    ratios = [math.exp(p - q) for p, q in zip(s.old.tolist(), s.behaviour.tolist(), strict=True)]
    product = math.prod(ratios)
    mean = product ** (1 / len(ratios))
    return {
        "token_tis": [r if r < high else high for r in ratios],
        "sequence_tis": [product if product < high else high] * len(ratios),
        "icepop": [r if low <= r <= high else 0.0 for r in ratios],
        "geometric_mask": [float(low <= mean <= high)] * len(ratios),
        "outlier_mask": [float(all(low <= r <= high for r in ratios))] * len(ratios),
    }[kind]


PUBLISHED = {
    "token_tis": (0, 2),
    "sequence_tis": (0, 5),
    "icepop": (0.5, 5),
    "geometric_mask": (0.99, 1.01),
    "outlier_mask": (1e-4, 100),
}
CASES = [
    ("token_tis", {"high": 1.2}, 0.3),
    ("token_tis", {}, 0.8),
    ("sequence_tis", {"high": 1.1}, 0.3),
    ("sequence_tis", {}, 1.5),
    ("icepop", {"low": 0.8, "high": 1.2}, 0.3),
    ("icepop", {}, 1.0),
    ("geometric_mask", {"low": 0.9, "high": 1.1}, 0.3),
    ("geometric_mask", {}, 0.02),
    ("outlier_mask", {"low": 0.6, "high": 1.6}, 0.3),
    ("outlier_mask", {}, 6.0),
]


def metrics_of(x, algo):
    sums = make_loss(algo)(x)[1]
    return finalize_metrics({key: value.item() for key, value in sums.items()})


@pytest.mark.parametrize(("kind", "bounds", "mismatch"), CASES)
def test_weights_equal_their_definition(kind, bounds, mismatch):
    batch = samples(mismatch=mismatch)
    low, high = PUBLISHED[kind]
    low, high = bounds.get("low", low), bounds.get("high", high)
    expected = [weights_by_definition(s, kind, low, high) for s in batch]
    flat = torch.tensor([c for row in expected for c in row], dtype=torch.float64)
    x = pack(batch, normalisers(batch, "token_mean"))
    got, _ = correction_weights(x, CorrectionConfig(kind=kind, **bounds))
    torch.testing.assert_close(got, flat, rtol=1e-12, atol=0)
    touched = [
        [c in (0.0, high) for c in row] if "tis" in kind or kind == "icepop" else [c == 0 for c in row]
        for row in expected
    ]
    tokens = sum(map(sum, touched))
    assert 0 < tokens < len(flat), "the case must show both"

    metrics = metrics_of(x, AlgorithmConfig(correction={"kind": kind, **bounds}))
    assert metrics["policy/correction_weight_mean"] == pytest.approx(flat.mean().item())
    assert metrics["policy/correction_tokens"] == pytest.approx(tokens / len(flat))
    assert metrics["policy/correction_sequences"] == pytest.approx(sum(map(any, touched)) / len(batch))
    assert metrics["policy/correction_ess"] == pytest.approx((flat.sum() ** 2 / flat.square().sum() / len(flat)).item())


@pytest.mark.parametrize("name", ["ppo_clip", "gspo", "gmpo", "sapo", "cispo", "reinforce"])
@pytest.mark.parametrize("kind", CORRECTION_BOUNDS)
def test_a_weight_scales_the_policy_gradient_of_its_token_and_nothing_else(name, kind):
    """The normaliser stays, KL and entropy are not weighted, and the weight itself has no gradient."""
    batch = samples(update=0.1)
    batch[0].behaviour[1] -= 10  # an outlier by anyone's measure
    # reinforce has no π_old: there the ratio is that of the present policy.
    x = pack(batch, normalisers(batch, "token_mean"), proximal=name != "reinforce", reference=True)

    def gradient(**settings) -> tuple[torch.Tensor, list]:
        make_loss(AlgorithmConfig(loss=name, **settings))(x)[0].backward(retain_graph=True)
        of_entropy = [s.entropy.grad for s in batch]
        return gradients(batch), of_entropy

    terms = {"kl": {"coef": 0.3}, "entropy_coef": 0.2}
    (plain, _), (both, entropy) = gradient(), gradient(**terms)
    corrected, corrected_entropy = gradient(**terms, correction={"kind": kind})
    weight, _ = correction_weights(x, CorrectionConfig(kind=kind))
    assert not weight.requires_grad and (weight != 1).any()
    torch.testing.assert_close(corrected, weight * plain + (both - plain), rtol=1e-10, atol=1e-14)
    assert all(torch.equal(a, b) for a, b in zip(corrected_entropy, entropy, strict=True))


@pytest.mark.parametrize("kind", CORRECTION_BOUNDS)
def test_engine_and_trainer_that_agree_are_not_corrected(kind):
    batch = samples(mismatch=0.0)
    x = pack(batch, normalisers(batch, "token_mean"))
    plain, corrected = (make_loss(AlgorithmConfig(correction={"kind": k}))(x)[0] for k in ("off", kind))
    assert plain == corrected
    metrics = metrics_of(x, AlgorithmConfig(correction={"kind": kind}))
    names = ("weight_mean", "ess", "tokens", "sequences")
    assert [metrics[f"policy/correction_{name}"] for name in names] == [1, pytest.approx(1), 0, 0]


def test_without_a_proximal_pass_the_ratio_is_that_of_the_present_policy():
    batch = samples()
    scales = normalisers(batch, "token_mean")
    single, passed = pack(batch, scales, proximal=False), pack(batch, scales)
    passed.arrays["proximal"] = passed.logprobs.detach()
    for kind in CORRECTION_BOUNDS:
        a, b = (correction_weights(x, CorrectionConfig(kind=kind))[0] for x in (single, passed))
        assert torch.equal(a, b) and not a.requires_grad


def test_a_product_over_a_long_sequence_survives_float32():
    n, per_token = 60_000, 2e-5
    one = torch.ones(n)
    batch = [Sample(-2 * one, one, -2 * one, -2 * one - per_token, one, 1.0)]
    x = pack(batch, [1 / n])
    weight, _ = correction_weights(x, CorrectionConfig(kind="sequence_tis"))
    represented = (batch[0].old.double() - batch[0].behaviour.double()).sum().exp()
    torch.testing.assert_close(weight, represented.float().expand(n), rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", CORRECTION_BOUNDS)
def test_a_behaviour_that_is_not_a_number_is_rejected_and_counted(kind):
    """By token or with its whole sequence; other sequences are as they were."""
    batch = samples(mismatch=0.0)
    before = make_loss(AlgorithmConfig())(pack(batch, normalisers(batch, "token_mean")))[0]
    before.backward()
    plain = gradients(batch)
    batch[2].behaviour[3] = math.nan
    start = len(batch[0]) + len(batch[1])
    lost = [start + 3] if kind in ("token_tis", "icepop") else list(range(start, start + len(batch[2])))
    x = pack(batch, normalisers(batch, "token_mean"))
    algo = AlgorithmConfig(correction={"kind": kind})
    value, sums = make_loss(algo)(x)
    value.backward()
    gradient = gradients(batch)
    assert torch.isfinite(value)
    plain[lost] = 0
    torch.testing.assert_close(gradient, plain)
    metrics = finalize_metrics({key: value.item() for key, value in sums.items()})
    assert metrics["policy/correction_tokens"] == pytest.approx(len(lost) / len(plain))
    assert metrics["policy/correction_sequences"] == pytest.approx(1 / len(batch))
    assert metrics["policy/correction_weight_mean"] == pytest.approx(1 - len(lost) / len(plain))


def test_all_left_out_has_no_effective_sample():
    batch = samples(mismatch=0.0)
    x = pack(batch, normalisers(batch, "token_mean"))
    x.behaviour = x.behaviour - 50
    metrics = metrics_of(x, AlgorithmConfig(correction={"kind": "outlier_mask"}))
    assert metrics["policy/correction_ess"] == metrics["policy/correction_weight_mean"] == 0
    assert metrics["policy/correction_tokens"] == metrics["policy/correction_sequences"] == 1


def test_every_kind_has_a_function_and_bounds():
    kinds = set(CorrectionConfig.model_fields["kind"].annotation.__args__) - {"off"}
    assert kinds == set(CORRECTIONS) == set(CORRECTION_BOUNDS)

"""Every policy term against its paper's formula in plain loops, for every reduction; and what all of them share."""

import math

import pytest

torch = pytest.importorskip("torch")

from loss_fixtures import LENGTHS, Sample, gradients, normalisers, pack, reduced, samples  # noqa: E402

from megatron_fleet.algorithms.loss_inputs import LossInputs  # noqa: E402
from megatron_fleet.algorithms.loss_metrics import needs_proximal  # noqa: E402
from megatron_fleet.algorithms.losses import make_loss  # noqa: E402
from megatron_fleet.algorithms.policy_terms import POLICY_TERMS  # noqa: E402
from megatron_fleet.config.errors import UserError  # noqa: E402
from megatron_fleet.config.schema import CLIP_BOUNDS, AlgorithmConfig  # noqa: E402

REDUCTIONS = ("token_mean", "sequence_mean", "constant")
LOSSES = sorted(POLICY_TERMS)
CORRECTIONS = ("off", "token_tis", "sequence_tis", "icepop", "geometric_mask", "outlier_mask")
LOW, HIGH = 0.15, 0.3


def used_by_ppo(ratio: torch.Tensor, advantage: float, low: float, high: float) -> torch.Tensor:
    """PPO's clip as a case distinction over the sign of the advantage."""
    if advantage >= 0:
        return ratio if ratio.item() <= 1 + high else torch.tensor(1 + high, dtype=ratio.dtype)
    return ratio if ratio.item() >= 1 - low else torch.tensor(1 - low, dtype=ratio.dtype)


def ppo_gains(s: Sample) -> list[torch.Tensor]:
    ratios = [(p - q).exp() for p, q in zip(s.logprobs, s.old, strict=True)]
    return [used_by_ppo(r, s.advantage, LOW, HIGH) * s.advantage for r in ratios]


def dual_gains(s: Sample) -> list[torch.Tensor]:
    cap = torch.tensor(1.2, dtype=torch.float64)
    gains = []
    for p, q in zip(s.logprobs, s.old, strict=True):
        used = used_by_ppo((p - q).exp(), s.advantage, LOW, HIGH)
        gains.append((cap if s.advantage < 0 and used.item() > 1.2 else used) * s.advantage)
    return gains


def gspo_gains(s: Sample) -> list[torch.Tensor]:
    """min(s·A, clip(s)·A) with the gradient straight through the sequence ratio; the same at each token."""
    ratio = 1.0
    for p, q in zip(s.logprobs, s.old, strict=True):
        ratio = ratio * ((p - q).exp()) ** (1 / len(s))
    return [used_by_ppo(ratio, s.advantage, LOW, HIGH) * s.advantage] * len(s)


def gmpo_gains(s: Sample) -> list[torch.Tensor]:
    """{Π |min(ρ·A, clip(ρ)·A)|}^(1/T) · sgn(A) with one |A| per factor, as the paper writes it."""
    product = 1.0
    for p, q in zip(s.logprobs, s.old, strict=True):
        product = product * (used_by_ppo((p - q).exp(), s.advantage, LOW, HIGH) * s.advantage).abs()
    return [product ** (1 / len(s)) * math.copysign(1, s.advantage)] * len(s)


def sapo_gains(s: Sample) -> list[torch.Tensor]:
    tau = 1.0 if s.advantage > 0 else 1.05
    ratios = [(p - q).exp() for p, q in zip(s.logprobs, s.old, strict=True)]
    return [4 / tau / (1 + (-tau * (r - 1)).exp()) * s.advantage for r in ratios]


def cispo_gains(s: Sample) -> list[torch.Tensor]:
    ratios = [math.exp(p.item() - q.item()) for p, q in zip(s.logprobs, s.old, strict=True)]
    weights = [min(max(r, 1 - LOW), 1 + HIGH) for r in ratios]
    return [w * s.advantage * p for w, p in zip(weights, s.logprobs, strict=True)]


def reinforce_gains(s: Sample) -> list[torch.Tensor]:
    return [s.advantage * p for p in s.logprobs]


def importance_gains(s: Sample) -> list[torch.Tensor]:
    gains = []
    for p, q in zip(s.logprobs, s.behaviour, strict=True):
        ratio = (p - q).exp()
        gains.append(ratio * s.advantage if 1 - LOW <= ratio.item() <= 1 + HIGH else 0 * p)
    return gains


BOUNDS = {"clip_low": LOW, "clip_high": HIGH}
TEXTBOOK = {
    "ppo_clip": (ppo_gains, BOUNDS),
    "dual": (dual_gains, BOUNDS | {"dual_clip": 1.2}),
    "gspo": (gspo_gains, BOUNDS),
    "gmpo": (gmpo_gains, BOUNDS),
    "sapo": (sapo_gains, {}),
    "cispo": (cispo_gains, BOUNDS),
    "reinforce": (reinforce_gains, {}),
    "importance_weighted": (importance_gains, BOUNDS),
}


def test_every_loss_has_a_textbook_version():
    assert set(TEXTBOOK) == set(POLICY_TERMS) | {"dual"}
    assert set(CLIP_BOUNDS) < set(POLICY_TERMS)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("name", TEXTBOOK)
def test_value_and_gradient_equal_the_paper(name, reduction):
    gains, settings = TEXTBOOK[name]
    loss = make_loss(AlgorithmConfig(loss="ppo_clip" if name == "dual" else name, **settings))
    for update in (0.1, 0.5):
        batch = samples(update)
        expected = reduced([gains(s) for s in batch], reduction)
        (-expected).backward()
        expected_gradient = gradients(batch)
        value, sums = loss(pack(batch, normalisers(batch, reduction)))
        value.backward()
        assert value.item() == pytest.approx(-expected.item(), rel=1e-12)
        torch.testing.assert_close(gradients(batch), expected_gradient, rtol=1e-10, atol=1e-14)
        assert sums["policy_loss"] == value
    removed = int((expected_gradient == 0).sum())
    assert (removed > 0) == (name in ("ppo_clip", "dual", "gspo", "gmpo", "importance_weighted"))
    if name != "cispo":
        assert sum(sums.get(f"clipped_{side}", torch.tensor(0.0)) for side in ("low", "high", "dual")) == removed
    else:
        assert sums["clipped_low"] > 0 and sums["clipped_high"] > 0


def test_a_sequence_is_clipped_whole_or_not_at_all():
    batch = samples(0.5)
    x = pack(batch, normalisers(batch, "sequence_mean"))
    make_loss(AlgorithmConfig(loss="gspo", **BOUNDS))(x)[0].backward()
    dead = [bool((s.logprobs.grad == 0).all()) for s in batch]
    assert dead == [not bool((s.logprobs.grad != 0).all()) for s in batch]
    assert any(dead) and not all(dead)


@pytest.mark.parametrize("name", LOSSES)
def test_the_default_bounds_are_the_losses_own(name):
    batch = samples(1.0 if name in ("cispo", "importance_weighted") else 0.05)
    x = pack(batch, normalisers(batch, "token_mean"))
    if name not in CLIP_BOUNDS:
        assert "clipped_low" not in make_loss(AlgorithmConfig(loss=name))(x)[1]
        return
    low, high = CLIP_BOUNDS[name]
    explicit = make_loss(AlgorithmConfig(loss=name, clip_low=low, clip_high=high))(x)[0]
    assert make_loss(AlgorithmConfig(loss=name))(x)[0] == explicit
    tighter = make_loss(AlgorithmConfig(loss=name, clip_low=low / 100, clip_high=high / 100))(x)[0]
    assert explicit != tighter


def test_the_bounds_of_an_own_loss_are_those_of_the_configuration():
    bounded = AlgorithmConfig(loss="mine:loss", clip_low=0.1, clip_high=0.3)
    assert bounded.ratio_bounds == (0.9, 1.3)
    with pytest.raises(UserError, match=r"mine:loss asks for the bounds of ratios; set algorithm\.clip_low and"):
        _ = AlgorithmConfig(loss="mine:loss", clip_high=0.3).ratio_bounds


@pytest.mark.parametrize("single_forward", [True, False])
@pytest.mark.parametrize("name", LOSSES)
def test_the_first_on_policy_update_is_reinforce(name, single_forward):
    batch = samples(update=0.0, mismatch=0.0)
    x = pack(batch, normalisers(batch, "sequence_mean"), proximal=not single_forward)
    _, sums = make_loss(AlgorithmConfig(loss=name, dual_clip=3.0))(x)
    make_loss(AlgorithmConfig(loss=name, dual_clip=3.0))(x)[0].backward()
    torch.testing.assert_close(gradients(batch), -x.scaled_advantages, rtol=1e-14, atol=0)
    assert sums.get("ratio", torch.tensor(x.logprobs.numel())) == x.logprobs.numel()
    assert all(sums[side] == 0 for side in ("clipped_low", "clipped_high") if side in sums)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("kind", CORRECTIONS)
def test_any_split_into_micro_batches_adds_up(name, kind):
    algo = AlgorithmConfig(loss=name, kl={"coef": 0.1}, entropy_coef=0.2, correction={"kind": kind})
    loss, batch = make_loss(algo), samples()
    scales = normalisers(batch, "sequence_mean")
    whole, whole_sums = loss(pack(batch, scales, reference=True))
    whole.backward()
    expected = gradients(batch)
    for split in ([[0], [1], [2], [3], [4], [5]], [[5, 0, 3], [], [4, 1, 2]], [[3, 2, 5, 4, 0, 1]]):
        total, added = 0.0, dict.fromkeys(whole_sums, 0.0)
        for micro_batch in split:
            value, sums = loss(pack([batch[i] for i in micro_batch], [scales[i] for i in micro_batch], reference=True))
            value.backward()
            total += value.item()
            assert sums.keys() == whole_sums.keys()
            assert all(v.dim() == 0 and not v.requires_grad for v in sums.values())
            added = {key: added[key] + sums[key].item() for key in added}
        assert total == pytest.approx(whole.item(), rel=1e-12)
        assert added == pytest.approx({key: v.item() for key, v in whole_sums.items()}, rel=1e-6)
        torch.testing.assert_close(gradients(batch), expected, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("kind", CORRECTIONS)
@pytest.mark.parametrize("name", LOSSES)
def test_far_policies_stay_finite(name, kind):
    loss = make_loss(AlgorithmConfig(loss=name, correction={"kind": kind}, kl={"coef": 0.1}, entropy_coef=0.1))
    for apart in (-1000.0, 1000.0):
        batch = samples(dtype=torch.float32)
        x = pack(batch, normalisers(batch, "token_mean"), reference=True)
        x.arrays = {"proximal": x.proximal + apart, "reference": x.reference - apart}
        x.behaviour, x.scaled_advantages[0] = x.behaviour - apart, 0.0
        value, sums = loss(x)
        value.backward()
        assert torch.isfinite(value) and torch.isfinite(gradients(batch)).all()
        assert all(torch.isfinite(v) for v in sums.values())


@pytest.mark.parametrize("clip_low", [0.2, 1.0])
def test_a_behaviour_that_is_not_a_number_is_left_out_and_counted(clip_low):
    algo = AlgorithmConfig(loss="importance_weighted", clip_low=clip_low, clip_high=9.0)
    whole, broken = samples(mismatch=0.01, update=0.01), samples(mismatch=0.01, update=0.01)
    broken[2].behaviour[3] = math.nan
    results = []
    for batch in (whole, broken):
        value, sums = make_loss(algo)(pack(batch, normalisers(batch, "token_mean")))
        value.backward()
        results.append((value, sums, gradients(batch)))
    (_, before, plain), (value, after, gradient) = results
    place = LENGTHS[0] + LENGTHS[1] + 3
    assert torch.isfinite(value) and gradient[place] == 0 != plain[place]
    plain[place] = 0
    torch.testing.assert_close(gradient, plain)
    assert (before["clipped_low"], after["clipped_low"]) == (0, 1) and before["clipped_high"] == after["clipped_high"]
    assert torch.isfinite(after["ratio"])


@pytest.mark.parametrize("kind", CORRECTIONS)
@pytest.mark.parametrize("name", LOSSES)
def test_a_row_without_trained_tokens_gives_zeros_and_a_backward_pass(name, kind):
    algo = AlgorithmConfig(loss=name, correction={"kind": kind}, kl={"coef": 0.1}, entropy_coef=0.1)
    for sequences in (0, 2):  # no sequence at all, and two that have no trained token here
        x = pack([], [], reference=True)
        x.sequences = sequences
        value, sums = make_loss(algo)(x)
        value.backward()
        assert x.logprobs.grad.shape == x.entropy.grad.shape == (0,)
        assert value == 0 and all(v == 0 for v in sums.values())


def elsewhere(device: str) -> LossInputs:
    """A micro-batch on another device, its own leaves."""
    batch = samples(dtype=torch.float32)
    x = pack(batch, normalisers(batch, "token_mean"), reference=True)
    fields = {f: getattr(x, f) for f in x.__slots__}
    fields["arrays"] = {name: values.to(device) for name, values in x.arrays.items()}
    there = LossInputs(**{f: v.detach().to(device) if isinstance(v, torch.Tensor) else v for f, v in fields.items()})
    there.logprobs.requires_grad_()
    there.entropy.requires_grad_()
    return there


@pytest.mark.parametrize("kind", CORRECTIONS)
@pytest.mark.parametrize("name", LOSSES)
def test_nothing_waits_for_a_value(name, kind):
    """On the meta device there are no values: `.item()`, a branch on a tensor or a bool index would raise."""
    there = elsewhere("meta")
    loss = make_loss(AlgorithmConfig(loss=name, correction={"kind": kind}, kl={"coef": 0.1}, entropy_coef=0.1))
    total, sums = loss(there)
    total.backward()
    assert {v.device.type for v in sums.values()} == {"meta"}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_device_is_never_waited_for():
    there = elsewhere("cuda")
    for name in LOSSES:
        for kind in CORRECTIONS:
            loss = make_loss(AlgorithmConfig(loss=name, correction={"kind": kind}, kl={"coef": 0.1}, entropy_coef=0.1))
            torch.cuda.set_sync_debug_mode("error")
            try:
                total, _ = loss(there)
                total.backward()
            finally:
                torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", LOSSES)
def test_a_pass_for_the_proximal_policy_only_where_it_changes_something(name):
    batch = samples()
    scales = normalisers(batch, "token_mean")
    loss = make_loss(AlgorithmConfig(loss=name))
    values = [loss(pack(batch, scales, proximal=proximal))[0].item() for proximal in (True, False)]
    assert (values[0] != values[1]) == needs_proximal(AlgorithmConfig(loss=name))


def test_bad_requests_are_refused():
    batch = samples()
    x = pack(batch, normalisers(batch, "token_mean"))
    with pytest.raises(ValueError, match="reference"):
        make_loss(AlgorithmConfig(kl={"coef": 0.1}))(x)
    with pytest.raises(UserError, match=r"algorithm\.loss=ppo is neither a built-in name nor package\.module:name"):
        make_loss(AlgorithmConfig.model_construct(loss="ppo"))

"""KL estimators: on a small categorical the mean over samples is a finite sum, so means and gradients are exact."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from megatron_fleet.algorithms.kl import kl_estimate  # noqa: E402
from megatron_fleet.algorithms.loss_metrics import MAX_K3  # noqa: E402

LOGITS = torch.tensor([0.3, -1.2, 0.9, 0.0], dtype=torch.float64)
REFERENCE = torch.log_softmax(torch.tensor([-0.5, 0.4, 0.1, 0.2], dtype=torch.float64), 0)


def expected_estimate(estimator: str) -> tuple[float, torch.Tensor]:
    """E_x~π of the estimate and of its gradient in the logits, summed over all x; π as a weight is a constant."""
    logits = LOGITS.clone().requires_grad_()
    logprobs = torch.log_softmax(logits, 0)
    mean = (logprobs.detach().exp() * kl_estimate(logprobs, REFERENCE, estimator)).sum()
    (gradient,) = torch.autograd.grad(mean, logits)
    return mean.item(), gradient


def exact_kl(forward: bool) -> tuple[float, torch.Tensor]:
    """KL(π‖π_ref), or KL(π_ref‖π) when ``forward``, and its gradient by central differences, not by autograd."""

    def kl(logits: torch.Tensor) -> float:
        p, q = torch.softmax(logits, 0), REFERENCE.exp()
        a, b = (q, p) if forward else (p, q)
        return (a * (a / b).log()).sum().item()

    h = 1e-6
    units = torch.eye(4, dtype=torch.float64)
    return kl(LOGITS), torch.tensor([(kl(LOGITS + h * u) - kl(LOGITS - h * u)) / (2 * h) for u in units])


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_k1_and_k3_have_the_value_of_the_kl(estimator):
    assert expected_estimate(estimator)[0] == pytest.approx(exact_kl(forward=False)[0], rel=1e-12)


def test_k2_has_the_value_of_half_the_mean_square():
    d = torch.log_softmax(LOGITS, 0) - REFERENCE
    assert expected_estimate("k2")[0] == pytest.approx((torch.softmax(LOGITS, 0) * d**2).sum().item() / 2)


@pytest.mark.parametrize(("estimator", "forward"), [("k1", False), ("k2", False), ("k3", True)])
def test_gradient_is_that_of_the_exact_kl(estimator, forward):
    gradient = expected_estimate(estimator)[1]
    torch.testing.assert_close(gradient, exact_kl(forward)[1].double(), rtol=1e-5, atol=1e-8)
    assert gradient.abs().max() > 0.1


def test_plain_k1_would_have_no_gradient():
    """The reason for the detour: differentiating log π − log π_ref gives the score, whose mean is 0."""
    logits = LOGITS.clone().requires_grad_()
    logprobs = torch.log_softmax(logits, 0)
    (gradient,) = torch.autograd.grad((logprobs.detach().exp() * (logprobs - REFERENCE)).sum(), logits)
    assert gradient.abs().max() < 1e-12


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_equal_policies_have_no_kl_and_far_ones_stay_finite(estimator):
    same = kl_estimate(REFERENCE, REFERENCE, estimator)
    assert same.abs().max() == 0
    logprobs = torch.tensor([-500.0, -0.1], requires_grad=True)
    far = kl_estimate(logprobs, torch.tensor([-0.1, -500.0]), estimator)
    far.sum().backward()
    assert torch.isfinite(far).all() and torch.isfinite(logprobs.grad).all()


@given(st.floats(-100, 100))
def test_k3_is_bounded_in_value_and_gradient(d):
    """As ``(exp(−d) − 1 + d).clamp(max=10)``, which is what verl, SkyRL, NeMo RL and slime use."""
    logprob = torch.tensor(d, dtype=torch.float64, requires_grad=True)
    value = kl_estimate(logprob, torch.zeros((), dtype=torch.float64), "k3")
    value.backward()
    clamped = math.exp(-d) - 1 + d > MAX_K3 == 10
    assert value.item() == (MAX_K3 if clamped else pytest.approx(math.exp(-d) - 1 + d, rel=1e-9, abs=1e-12))
    assert logprob.grad.item() == (0 if clamped else pytest.approx(1 - math.exp(-d), rel=1e-9, abs=1e-12))

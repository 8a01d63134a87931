"""The named algorithms of configs/algorithm, from rewards to gradients, against their papers."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("hydra")

from megatron_fleet.agents.trajectory import Group, Outcome, Span, Trajectory  # noqa: E402
from megatron_fleet.algorithms.batch import build_data, split_batch  # noqa: E402
from megatron_fleet.algorithms.loss_inputs import LossInputs  # noqa: E402
from megatron_fleet.algorithms.losses import make_loss  # noqa: E402
from megatron_fleet.config.load import load  # noqa: E402

REWARDS = ((1.0, 0.0, 0.0, 1.0), (0.5, 0.0, 1.0, 0.0))
LENGTHS = ((5, 2, 7, 3), (1, 6, 4, 2))
ORDER = (3, 0, 7, 5, 1, 6, 2, 4)
"""The order in which the sequences lie in the micro-batch."""


def algorithm(name, *overrides):
    return load(["experiment=quickstart", f"algorithm={name}", *overrides]).algorithm


def groups():
    out = []
    for g, (rewards, lengths) in enumerate(zip(REWARDS, LENGTHS, strict=True)):
        trajectories = []
        for s, (reward, n) in enumerate(zip(rewards, lengths, strict=True)):
            mask = np.arange(n + 2) >= 2
            spans = (Span("prompt", 0, n + 2, 0),)
            tokens, logprobs = np.zeros(n + 2, np.int32), np.zeros(n + 2, np.float32)
            trajectories.append(
                Trajectory("t", "e", g, s, tokens, mask, logprobs, spans, reward, "", Outcome.COMPLETED)
            )
        out.append(Group(g, "t", "e", trajectories))
    return out


def policies():
    """log π (leaves) and log π_old of each sequence, float64."""
    g = torch.Generator().manual_seed(2)
    lengths = [n for group in LENGTHS for n in group]
    old = [-1 - torch.rand(n, generator=g, dtype=torch.float64) for n in lengths]
    new = [o + 0.3 * torch.randn(len(o), generator=g, dtype=torch.float64) for o in old]
    return [n.requires_grad_() for n in new], old


def ours(name, *overrides):
    """Loss and gradients of each sequence, through the data that training would make."""
    algo = algorithm(name, *overrides)
    (data,), (new, old) = split_batch(build_data(groups(), algo), 1, algo), policies()
    assert len(data) == len(new)
    advantages = [torch.from_numpy(d.scaled_advantages[d.loss_mask]).double() for d in data]
    x = LossInputs(
        logprobs=torch.cat([new[i] for i in ORDER]),
        entropy=torch.cat([torch.zeros_like(old[i]) for i in ORDER]),
        loss_scale=torch.cat([torch.full_like(advantages[i], data[i].loss_scale) for i in ORDER]),
        scaled_advantages=torch.cat([advantages[i] for i in ORDER]),
        behaviour=torch.cat([old[i] for i in ORDER]),
        sequence=torch.repeat_interleave(torch.arange(len(ORDER)), torch.tensor([len(new[i]) for i in ORDER])),
        sequences=len(ORDER),
        arrays={"proximal": torch.cat([old[i] for i in ORDER])},
    )
    loss, _ = make_loss(algo)(x)
    loss.backward()
    return loss.item(), [p.grad for p in new]


def papers(objective, std):
    """The same from ``objective(log π, log π_old, advantage)``, one term per sequence, averaged over all."""
    new, old = policies()
    advantages = []
    for rewards in REWARDS:
        mean = sum(rewards) / len(rewards)
        spread = (sum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1)) ** 0.5 + 1e-6 if std else 1.0
        advantages += [(r - mean) / spread for r in rewards]
    loss = -sum(objective(p, q, a) for p, q, a in zip(new, old, advantages, strict=True)) / len(new)
    loss.backward()
    return loss.item(), [p.grad for p in new]


def clipped(ratio, advantage, low, high):
    return min(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)


def dr_grpo(new, old, advantage):
    """Dr. GRPO, arXiv:2503.20783: the sum over tokens, divided by a constant instead of the length."""
    return sum(clipped(r, advantage, 0.2, 0.2) for r in (new - old).exp()) / 40


def grpo_of_deepseek(new, old, advantage):
    """arXiv:2402.03300 eq. 3: the mean over the tokens of each sequence."""
    return sum(clipped(r, advantage, 0.2, 0.2) for r in (new - old).exp()) / len(new)


def gspo(new, old, advantage):
    return clipped((new - old).mean().exp(), advantage, 3e-4, 4e-4)


def gmpo(new, old, advantage):
    bound = 0.4 if advantage > 0 else -0.4
    terms = [min(t, t * 0 + bound) if advantage > 0 else max(t, t * 0 + bound) for t in new - old]
    return (sum(terms) / len(terms)).exp() * advantage


def sapo(new, old, advantage):
    tau = 1.0 if advantage > 0 else 1.05
    return (4 / tau * torch.sigmoid(tau * ((new - old).exp() - 1)) * advantage).mean()


def ratio_of_sums(per_token):
    """DAPO's normaliser: all tokens of the batch."""
    tokens, sequences = sum(map(sum, LENGTHS)), sum(map(len, LENGTHS))
    return lambda new, old, advantage: per_token(new, old, advantage).sum() * sequences / tokens


def cispo(new, old, advantage):
    return (new - old).exp().clamp(max=5).detach() * advantage * new


def reinforce(new, old, advantage):
    return advantage * 4 / 3 * new  # leave-one-out of 4


def masked_ratio(new, old, advantage):
    ratio = (new - old).exp()
    return torch.where((ratio >= 0.5) & (ratio <= 5), ratio * advantage, 0 * ratio)


@pytest.mark.parametrize(
    ("name", "objective", "std", "overrides"),
    [
        ("dr_grpo", dr_grpo, False, ["algorithm.reduction_constant=40"]),
        ("grpo", grpo_of_deepseek, True, ["algorithm.reduction=sequence_mean"]),
        ("gspo", gspo, True, []),
        ("gmpo", gmpo, True, []),
        ("sapo", sapo, True, []),
        ("cispo", ratio_of_sums(cispo), True, []),
        ("reinforce", ratio_of_sums(reinforce), False, []),
        ("importance_weighted", ratio_of_sums(masked_ratio), True, []),
    ],
)
def test_a_preset_is_its_paper(name, objective, std, overrides):
    value, gradient = ours(name, *overrides)
    expected, expected_gradient = papers(objective, std)
    assert value == pytest.approx(expected, rel=1e-6, abs=1e-7)
    for got, wanted in zip(gradient, expected_gradient, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-9)
    assert any((g != 0).any() for g in gradient)

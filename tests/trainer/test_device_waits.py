"""The host never waits for the device inside a micro-batch: it enqueues work ahead of it.

`benchmarks/counting.py` plays the device: its tensors have no values, so whatever reads one is found.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

pytest.importorskip("megatron_fleet.trainer.megatron")

from counting import DEVICE, DeviceWork, as_device, chunk_on_device, run_logprobs, run_micro_batches, take_step
from policy_fixtures import make_batch
from routing_models import record_anything
from tiny_configs import raw_config

from megatron_fleet.algorithms.losses import LossInputs, LossResult, make_loss
from megatron_fleet.algorithms.policy_terms import POLICY_TERMS
from megatron_fleet.config.schema import AlgorithmConfig, ParallelConfig
from megatron_fleet.config.sections.algorithm import CORRECTION_BOUNDS
from megatron_fleet.models.hf_config import read_model
from megatron_fleet.trainer.megatron import build, gradients, parallel

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="plays a device on a host that has none")

EXPERT_LAYERS = {"qwen3": 0, "qwen3_moe": 4, "deepseek_v3": 3, "qwen3_5_text": 0, "qwen3_5_moe_text": 4}
"""Family → layers with experts of its tiny model."""
TOKENS = 512


@pytest.fixture(scope="module", autouse=True)
def _alone() -> Iterator[None]:
    parallel.initialise(ParallelConfig(), seed=0)
    yield
    parallel.shutdown()


def work_of(
    family, loss=None, micro_batches: int = 1, routing: bool = False, run=run_micro_batches, **more
) -> DeviceWork:
    """Work of a pass over equal micro-batches with a tiny model; ``more``: settings of Megatron's."""
    hf = raw_config(family, "v5")
    hf |= {"mtp_num_hidden_layers": 0} if "mtp_num_hidden_layers" in hf else {}
    data = make_batch(6, vocab_size=100)
    if routing:
        record_anything(data, choices=hf["num_experts_per_tok"], whole=True)
    work = DeviceWork()
    with as_device(work):
        chunk = chunk_on_device(hf, TOKENS, **more)
        work.waits.clear()
        run(chunk, [data] * micro_batches, loss or make_loss(AlgorithmConfig()))
    return work


@pytest.mark.parametrize("family", EXPERT_LAYERS)
def test_only_layers_with_experts_wait_and_only_once(family):
    """For the sizes of their messages, in the forward pass: Megatron's dispatcher without dropped tokens."""
    work = work_of(family, micro_batches=2)
    assert work.waits == []
    assert len(work.by_design) == 2 * EXPERT_LAYERS[family]
    assert work.of_phase("backward")["mm"] > work.of_phase("forward")["mm"] > 0  # the pass was a whole one


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_a_step_waits_for_its_metrics_and_for_the_norm_of_the_gradient(family):
    work = work_of(family, run=take_step, micro_batches=2)
    assert [wait.rpartition("/")[2].partition(":")[0] for wait in work.waits] == ["step.py", "clip_grads.py"]


def test_a_pass_without_gradients_waits_for_nothing():
    work = work_of("qwen3", run=run_logprobs, micro_batches=2)
    assert work.waits == [] and work.of_phase("forward")["mm"] and not work.of_phase("backward")


def test_gradients_that_are_measured_wait_for_nothing():
    work, here = DeviceWork(), torch.zeros(4, dtype=torch.int64, device=DEVICE)
    with as_device(work):
        piece = gradients._Piece(1, torch.nn.Parameter(torch.zeros(8, 8, device=DEVICE)), *[here] * 4, True, True)
        keep = gradients._Keep(piece, torch.zeros(1, 2, 64, 64, device=DEVICE))
        keep(torch.zeros(8, 8, device=DEVICE, dtype=torch.bfloat16))
    assert work.waits == [] and work.of_phase("forward")


def test_recomputed_layers_wait_for_nothing():
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    work = work_of("qwen3", **full)
    assert work.waits == [] and work.of_phase("backward")["rms_norm"] > 0
    # Angles of the rotary embedding are kept for the whole micro-batch, recomputed layers included.
    assert work.of_phase("forward")["cos"] == 1 and work.of_phase("backward")["cos"] == 0


def test_replayed_routing_waits_for_nothing():
    work = work_of("qwen3_moe", routing=True)
    assert work.waits == [] and work.of_phase("forward")["gather"] > 0


def test_pipeline_stages_do_not_wait_for_the_device_after_each_send():
    model = read_model(raw_config("qwen3", "v5"))
    assert not build.transformer_config(model, ParallelConfig(pipeline=2), torch.bfloat16).batch_p2p_sync


def test_a_value_that_is_read_is_found_with_its_place():
    def curious(x: LossInputs) -> LossResult:
        total, sums = make_loss(AlgorithmConfig())(x)
        return total, sums | {"loss_on_host": torch.tensor(x.logprobs.sum().item())}

    work = work_of("qwen3", curious, micro_batches=2)
    assert len(work.waits) == 2
    assert all("_local_scalar_dense reads values" in wait and Path(__file__).name in wait for wait in work.waits)


WAITS = {
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 0],
    "masked_select": lambda x: x.masked_select(x > 0),
    "tolist": lambda x: x.tolist(),
    "unique": lambda x: x.unique(),
    "to_host": lambda x: x.to("cpu"),
    "if": lambda x: bool((x > 0).any()),
    "repeats": lambda x: x.repeat_interleave(x.long()),
    "from_host": lambda x: torch.ones(3).to(x.device),
    "new_values": lambda x: x.new_tensor([1.0, 2.0]),
    "tensor": lambda x: torch.tensor([1.0], device=x.device),
    "index_on_host": lambda x: x[torch.tensor([1])],
}


@pytest.mark.parametrize("name", WAITS)
def test_each_way_of_waiting_is_found(name):
    work = DeviceWork()
    x = torch.zeros(4, device=DEVICE)
    with as_device(work), suppress(RuntimeError, NotImplementedError):  # there are no values to go on with
        WAITS[name](x)
    assert len(work.waits) == 1


def test_what_does_not_wait_is_no_wait():
    work = DeviceWork()
    x = torch.zeros(4, device=DEVICE)
    with as_device(work):
        index = torch.tensor([1, 0]).pin_memory().to(DEVICE, non_blocking=True)
        chosen = torch.where(x > 0, x, 0.0)[index].masked_fill(index > 0, 1.0)
        torch.zeros(2, device=DEVICE)[chosen.long()] = 1.0
        int(torch.tensor([3])[0])  # of the host
    assert work.waits == [] and (work.copies, work.copied) == (1, 16)


@pytest.mark.parametrize("loss", POLICY_TERMS)
@pytest.mark.parametrize("correction", [None, *CORRECTION_BOUNDS])
def test_losses_wait_for_nothing(loss, correction):
    tree = {"loss": loss, "kl": {"coef": 0.1, "estimator": "k3"}, "entropy_coef": 0.1}
    if correction is not None:
        tree["correction"] = {"kind": correction}
    function = make_loss(AlgorithmConfig.model_validate(tree))
    work = DeviceWork()
    with as_device(work):
        values = [torch.zeros(8, device=DEVICE, requires_grad=number < 2) for number in range(8)]
        sequence = torch.zeros(8, device=DEVICE, dtype=torch.int64)
        arrays = dict(zip(("proximal", "reference", "staleness"), values[5:], strict=True))
        total, _ = function(LossInputs(*values[:5], sequence, 3, arrays))
        total.backward()
    assert work.waits == [] and work.of_phase("backward")

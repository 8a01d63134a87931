"""Computed parameters, gradients and optimizer states are those that Megatron makes, to the element.

Megatron's model, gradient buffers and optimizer are built on the meta device with a process group that sends nothing:
one process is any rank of any layout, and a model of any size takes no memory.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("megatron_fleet.trainer.megatron")

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from policy_fixtures import make_config, write_config
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._device import _device_constructors

from megatron_fleet.config.schema import LoraConfig, OptimizerConfig, ParallelConfig, PrecisionConfig
from megatron_fleet.models.hf_config import read_model
from megatron_fleet.planning.memory import phases
from megatron_fleet.planning.memory.parameters import count_elements, held_by_stage
from megatron_fleet.planning.memory.phases import trainer_memory
from megatron_fleet.trainer.megatron import build, lora, offload, optimizer
from megatron_fleet.trainer.megatron.policy import MegatronPolicy
from megatron_fleet.trainer.megatron.precision import precision_arguments
from megatron_fleet.weight_sync.cuda_ipc.sender import BUFFER_BYTES

sys.path.insert(0, str(Path(__file__).parents[1] / "weights"))
from published_configs import published

BF16 = torch.bfloat16


class OnMeta(TorchFunctionMode):
    """Inside, tensors are made without memory, and have the type names that Megatron asks for."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func in _device_constructors():
            kwargs["device"] = "meta"
        result = func(*args, **kwargs)
        return result.replace("meta.", "") if isinstance(result, str) else result


@pytest.fixture
def as_rank(monkeypatch):
    """Make this process a rank of a layout, with Megatron's groups."""

    def gather(out: list, mine, group=None) -> None:
        out[:] = [mine] * len(out)

    monkeypatch.setattr(dist, "all_gather_object", gather)

    def become(parallel: ParallelConfig, rank: int) -> None:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=parallel.world_size)
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=parallel.tensor,
            pipeline_model_parallel_size=parallel.pipeline,
            virtual_pipeline_model_parallel_size=parallel.virtual if parallel.virtual > 1 else None,
            context_parallel_size=parallel.context,
            expert_model_parallel_size=parallel.expert,
            expert_tensor_parallel_size=parallel.expert_tensor_size,
            create_gloo_process_groups=False,
        )
        tensor_parallel.model_parallel_cuda_manual_seed(1)

    yield become
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def made(hf, parallel, settings=None, precision=None):
    """Model chunks with buffers, and optimizer."""
    settings = settings or OptimizerConfig(lr=1e-6)
    more = precision_arguments(precision or PrecisionConfig(), settings, experts=False)
    with OnMeta():
        chunks = [optimizer.wrap(chunk, more.gradients) for chunk in build.build_chunks(hf, parallel, BF16, 64)]
        return chunks, optimizer.build(chunks, settings, BF16, more.optimizer)


def optimizer_nbytes(adam) -> int:
    tensors = [p for part in adam.chained_optimizers for group in part.optimizer.param_groups for p in group["params"]]
    states = [state for part in adam.chained_optimizers for state in part.optimizer.state.values()]
    tensors += [
        value for state in states for value in state.values() if isinstance(value, torch.Tensor) and value.dim()
    ]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


LAYOUTS = [
    ("Qwen3-8B", 36, ParallelConfig(tensor=2, data=4), 0),
    ("Qwen3-8B", 36, ParallelConfig(tensor=4, data=2), 5),
    ("Qwen3-0.6B", 28, ParallelConfig(pipeline=2), 0),  # tied: the head is a copy of the embedding
    ("Qwen3-0.6B", 28, ParallelConfig(pipeline=2), 1),
    ("Qwen2.5-7B", 8, ParallelConfig(tensor=2, pipeline=2, virtual=2), 3),
    ("Llama-3.2-1B", 16, ParallelConfig(context=2), 1),
    ("Qwen3-30B-A3B", 4, ParallelConfig(tensor=2, data=4, expert=8), 0),
    ("Qwen3-30B-A3B", 4, ParallelConfig(tensor=2, data=2, expert=2), 3),
    ("Moonlight-16B-A3B", 5, ParallelConfig(pipeline=2, first_stage_layers=2, data=4, expert=2), 0),
    ("Moonlight-16B-A3B", 5, ParallelConfig(pipeline=2, first_stage_layers=2, data=4, expert=2), 7),
    ("Moonlight-16B-A3B", 3, ParallelConfig(tensor=4, data=2, expert=2, expert_tensor=2), 0),
    ("GLM-4.5-Air", 3, ParallelConfig(tensor=2, data=2, expert=4), 0),
]


@pytest.mark.parametrize(("name", "layers", "parallel", "rank"), LAYOUTS)
def test_elements_are_those_of_megatrons_buffers(as_rank, name, layers, parallel, rank):
    compare(as_rank, published()[name] | {"num_hidden_layers": layers}, parallel, rank)


@pytest.mark.parametrize("parallel", [ParallelConfig(tensor=2, data=3), ParallelConfig(pipeline=2, virtual=2)])
def test_padding_of_odd_sizes(as_rank, parallel):
    """No tensor fills a multiple of 64 elements, and data-parallel ranks do not divide the buffer."""
    odd = {"num_hidden_layers": 4, "hidden_size": 1002, "head_dim": 40, "intermediate_size": 334, "vocab_size": 1001}
    counted = compare(as_rank, published()["Qwen3-0.6B"] | odd, parallel, 0)
    assert counted.padding > 128


def compare(as_rank, hf, parallel, rank):
    """Assert that what is counted is what Megatron makes; return the counts."""
    as_rank(parallel, rank)
    chunks, adam = made(hf, parallel)
    stage = rank * parallel.pipeline // parallel.world_size
    counted = count_elements(held_by_stage(read_model(hf), parallel, stage), parallel, 2)
    parameters = [p for chunk in chunks for p in chunk.module.parameters()]
    assert counted.trained == sum(p.numel() for p in parameters)
    biases = [b for chunk in chunks for name, b in chunk.module.named_buffers() if name.endswith("expert_bias")]
    assert counted.stored == sum(t.numel() * t.element_size() for t in (*parameters, *biases))
    buffers = [buffer for chunk in chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    assert counted.buffers == sum(buffer.numel for buffer in buffers)
    # A rank whose share ends in padding has less of it: nothing is stored for padding.
    assert 0 <= 12 * counted.shards - optimizer_nbytes(adam) <= 12 * counted.padding
    return counted


def test_bfloat16_gradients_halve_the_buffer(as_rank):
    hf, parallel = published()["Qwen3-0.6B"], ParallelConfig(data=2)
    as_rank(parallel, 0)
    chunks, _ = made(hf, parallel, precision=PrecisionConfig(gradients="bfloat16"))
    counted = count_elements(held_by_stage(read_model(hf), parallel), parallel, 2)
    assert sum(b.grad_data.numel() * b.grad_data.element_size() for b in chunks[0].buffers) == 2 * counted.buffers


@pytest.mark.parametrize(
    ("targets", "parallel"),
    [
        (("attention", "mlp"), ParallelConfig(tensor=2, data=2)),
        (("attention", "mlp", "experts"), ParallelConfig(tensor=2, data=2, expert=2)),
    ],
)
def test_adapters_are_counted_as_they_are_attached(as_rank, targets, parallel):
    hf = published()["Moonlight-16B-A3B"] | {"num_hidden_layers": 2}
    settings = LoraConfig(rank=16, targets=targets)
    as_rank(parallel, 0)
    with OnMeta():
        chunks = build.build_chunks(hf, parallel, BF16, 64)
        lora.attach(chunks, hf, settings, 1)
    trained = [p for chunk in chunks for p in chunk.parameters() if p.requires_grad]
    counted = count_elements(held_by_stage(read_model(hf), parallel, 0, settings), parallel, 2)
    assert counted.trained == sum(p.numel() for p in trained)
    assert counted.stored > 2 * counted.trained


def test_constants_are_those_of_the_code_that_allocates():
    assert (phases.PINNED_BLOCK, phases.TRANSFER_BUFFER) == (offload.BLOCK_BYTES, BUFFER_BYTES)


def test_states_of_a_rank_are_those_that_offload_moves(tmp_path):
    folder = write_config(tmp_path / "model", hidden_size=128, intermediate_size=256, head_dim=64, vocab_size=512)
    config = make_config(folder, dtype="bfloat16")
    policy = MegatronPolicy(config, init="random")
    try:
        sizes = policy.train_state().sizes()
        buffers = sum(b.nbytes for b in policy.model_chunks[0].buffers())
        computed = trainer_memory(config, read_model(policy.hf_config), 0)
        assert computed.states | {"parameters": computed.parameters + buffers} == sizes
        policy.begin_save(tmp_path / "checkpoint", copy=True)
        assert computed.saved == policy._host.nbytes
    finally:
        policy.close()

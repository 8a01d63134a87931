"""One rank of test_megatron_layers: every model in every layout, one after the other.

Argument: a folder; what this rank measured goes to ``<rank>.pt`` in it.
"""

from __future__ import annotations

import hashlib
import sys
from functools import partial
from pathlib import Path
from typing import Any

import megatron_fleet.platform.megatron  # noqa: F401  isort: skip  (before any import of megatron.core)
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import mappings
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from megatron_fleet.platform.megatron.attention import MicroBatchParams
from megatron_fleet.platform.megatron.spec import layer_spec
from megatron_fleet.trainer.megatron.build import parameter_shards

VOCAB, LENGTHS, FILLER, MICRO_BATCHES = 64, (9, 5), 2, 4
TOKENS = sum(LENGTHS) + FILLER
_LAYOUT = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size")
_EXPERT_LAYOUT = ("expert_model_parallel_size", "expert_tensor_parallel_size")
LAYOUTS: dict[str, tuple[int | None, ...]] = {
    "data 4": (1, 1, None, 1, 1),
    "tensor 2, expert 2": (2, 1, None, 2, 1),
    "tensor 2, expert 2 x 2": (2, 1, None, 2, 2),
    "tensor 2, pipeline 2": (2, 2, None, 1, 2),
    "pipeline 2 x 2": (1, 2, 2, 1, 1),
    "pipeline 2 x 2, expert 2": (1, 2, 2, 2, 1),
}
EXPERTS: dict[str, Any] = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 12,
    "moe_token_dispatcher_type": "alltoall",
    "moe_router_load_balancing_type": "none",
    "moe_router_dtype": "fp32",
}
MODELS: dict[str, dict[str, Any]] = {
    "latent": {
        **EXPERTS,
        "multi_latent_attention": True,
        "qk_layernorm": True,
        "q_lora_rank": 10,
        "kv_lora_rank": 6,
        "qk_head_dim": 4,
        "qk_pos_emb_head_dim": 6,
        "v_head_dim": 8,
        "rope_type": "yarn",
        "rotary_scaling_factor": 4.0,
        "original_max_position_embeddings": 8,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "moe_layer_freq": [0, 1, 1, 1],
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.0,
        "moe_router_num_groups": 2,
        "moe_router_group_topk": 1,
        "moe_shared_expert_intermediate_size": 8,
    },
    "latent without query rank": {
        "multi_latent_attention": True,
        "qk_layernorm": True,
        "q_lora_rank": None,
        "kv_lora_rank": 6,
        "qk_head_dim": 4,
        "qk_pos_emb_head_dim": 6,
        "v_head_dim": 8,
        "rope_type": "rope",
        "rotary_scaling_factor": 1.0,
    },
    "grouped": {
        **EXPERTS,
        "num_query_groups": 2,
        "kv_channels": 6,
        "qk_layernorm": True,
        "add_qkv_bias": True,
        "moe_layer_freq": 1,
    },
    "without norms": {"num_query_groups": 2, "kv_channels": 6, "add_qkv_bias": True},
}
JOBS = [(m, name) for m, s in MODELS.items() for name in LAYOUTS if "num_moe_experts" in s or "expert" not in name]


def config(model: dict[str, Any], layout: dict[str, Any]) -> TransformerConfig:
    kind = MLATransformerConfig if "multi_latent_attention" in model else TransformerConfig
    return kind(
        num_layers=4,
        hidden_size=16,
        ffn_hidden_size=20,
        num_attention_heads=4,
        normalization="RMSNorm",
        activation_func=F.silu,
        gated_linear_unit=True,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=torch.float32,
        pipeline_dtype=torch.float32,
        sequence_parallel=layout["tensor_model_parallel_size"] > 1,
        calculate_per_token_loss=True,
        apply_rope_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        use_te_activation_func=True,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        batch_p2p_comm=False,
        **layout,
        **model,
    )


def build(settings: TransformerConfig) -> list[GPTModel]:
    chunks = []
    virtual = settings.virtual_pipeline_model_parallel_size
    for stage in range(virtual) if virtual else [None]:
        first, last = (
            at(ignore_virtual=False, vp_stage=stage)
            for at in (parallel_state.is_pipeline_first_stage, parallel_state.is_pipeline_last_stage)
        )
        chunks.append(
            GPTModel(
                settings,
                layer_spec(settings, stage),
                vocab_size=VOCAB,
                max_sequence_length=TOKENS,
                pre_process=first,
                post_process=last,
                position_embedding_type="rope",
                parallel_output=False,
                vp_stage=stage,
            )
        )
    fill(chunks)
    return chunks


def place(shard: Any) -> tuple[slice, ...]:
    sizes = [1] * shard.prepend_axis_num + list(shard.local_shape)
    return tuple(slice(o, o + n) for o, n in zip(shard.global_offset, sizes, strict=True))


@torch.no_grad()
def fill(chunks: list[GPTModel]) -> None:
    """Weights that depend on their checkpoint key and place alone."""
    for shard in parameter_shards(chunks):
        seed = int.from_bytes(hashlib.sha256(shard.key.encode()).digest()[:7], "little")
        whole = torch.randn(tuple(shard.global_shape), generator=torch.Generator().manual_seed(seed))
        whole = 1 + 0.2 * whole if "norm" in shard.key else 0.3 * whole
        shard.data.copy_(whole[place(shard)].reshape(shard.data.shape))


def micro_batch_params() -> MicroBatchParams:
    pieces = (*LENGTHS, FILLER)
    ends = torch.tensor([0, *pieces]).cumsum(0).int()
    longest = max(pieces)
    return MicroBatchParams("thd", ends, ends, None, None, longest, longest, lengths=LENGTHS, filler=FILLER)


def train_step(settings: TransformerConfig, chunks: list[GPTModel]) -> dict[str, Any]:
    """Logits of this rank's micro-batches, and gradients with their place, of a loss over all micro-batches."""
    random = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, VOCAB, (MICRO_BATCHES, 1, TOKENS), generator=random)
    factors = torch.randn(MICRO_BATCHES, TOKENS, VOCAB, generator=random)
    factors[:, sum(LENGTHS) :] = 0
    positions = torch.cat([torch.arange(n) for n in (*LENGTHS, FILLER)])[None]
    logits: dict[int, torch.Tensor] = {}

    def loss(micro_batch: int, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        logits[micro_batch] = output[0].detach().clone()
        return (output[0] * factors[micro_batch]).sum(), torch.tensor(0, dtype=torch.int32), {}

    def forward(micro_batches: Any, model: Any) -> tuple[torch.Tensor, Any]:
        micro_batch = next(micro_batches)
        return model(tokens[micro_batch], positions, None, packed_seq_params=micro_batch_params()), partial(
            loss, micro_batch
        )

    ddp = [DistributedDataParallel(settings, DistributedDataParallelConfig(), chunk) for chunk in chunks]
    mine = range(MICRO_BATCHES)[
        parallel_state.get_data_parallel_rank() :: parallel_state.get_data_parallel_world_size()
    ]
    several = len(ddp) > 1
    get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=[iter(mine) for _ in ddp] if several else iter(mine),
        model=ddp if several else ddp[0],
        num_microbatches=len(mine),
        seq_length=TOKENS,
        micro_batch_size=1,
        forward_only=False,
    )
    finalize_model_grads(ddp, None)
    for chunk in chunks:
        for parameter in chunk.parameters():
            parameter.data = parameter.main_grad
    gradients = [
        (s.key, tuple(s.global_shape), place(s), s.data.detach().clone())
        for s in parameter_shards(chunks)
        if not s.key.endswith("expert_bias")
    ]
    return {"logits": logits, "gradients": gradients}


def uneven(group: Any) -> dict[str, torch.Tensor]:
    """Results of Megatron's collectives for parts of different sizes, one of them empty."""
    rank, sizes = dist.get_rank(), [3, 0, 1, 2]
    gathered = mappings._gather_along_first_dim(torch.full((sizes[rank], 2), float(rank)), group, sizes)
    terms = torch.arange(12.0).view(6, 2) * 10**rank
    return {"gathered": gathered, "scattered": mappings._reduce_scatter_along_first_dim(terms, group, sizes)}


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    results: dict[Any, Any] = {"uneven": uneven(dist.group.WORLD)}
    for name, sizes in LAYOUTS.items():
        layout = dict(zip((*_LAYOUT, *_EXPERT_LAYOUT), sizes, strict=True))
        parallel_state.initialize_model_parallel(**layout, create_gloo_process_groups=False)
        model_parallel_cuda_manual_seed(0)
        for model in (model for model, layout_name in JOBS if layout_name == name):
            settings = config(MODELS[model], layout)
            results[model, name] = train_step(settings, build(settings))
        # The default group stays: ranks that leave and meet again at one port can miss each other.
        parallel_state.destroy_model_parallel()
    torch.save(results, folder / f"{dist.get_rank()}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))

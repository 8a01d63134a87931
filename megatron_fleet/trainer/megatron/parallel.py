"""Process groups of the trainer's ranks."""

from __future__ import annotations

from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from megatron_fleet.config.errors import UserError
from megatron_fleet.config.schema import ParallelConfig
from megatron_fleet.platform import communicator, device


def initialise(parallel: ParallelConfig, seed: int, timeout_s: float = 1800.0) -> None:
    """Join the ranks (RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as torchrun sets them; a single rank without them)
    and build Megatron's groups.

    Args:
        timeout_s: of each collective in Megatron's groups, which do not take over that of all ranks.

    Raises:
        UserError: the world size is not tensor × pipeline × context × data.
    """
    communicator.join(device.backend())
    world, started = parallel.world_size, communicator.TorchCommunicator().size
    if started != world:
        raise UserError(
            f"parallel.tensor={parallel.tensor} × parallel.pipeline={parallel.pipeline} × "
            f"parallel.context={parallel.context} × parallel.data={parallel.data} needs {world} processes, "
            f"{started} were started; change one."
        )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=parallel.virtual if parallel.virtual > 1 else None,
        context_parallel_size=parallel.context,
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=parallel.expert_tensor_size,
        create_gloo_process_groups=False,
        distributed_timeout_minutes=timeout_s / 60,
    )
    model_parallel_cuda_manual_seed(seed)


def shutdown() -> None:
    """Leave all groups."""
    parallel_state.destroy_model_parallel()
    communicator.leave()

"""Memory, traffic and time of a checkpoint on data-parallel ranks, against Megatron's own, and its copies to a store.
Prints one line of JSON.

Each rank saves and loads its model and optimizer, first as runs do (``ours``), then with the optimizer state that
Megatron-Core gathers on every rank (``gathered``: ``fully_reshardable``, written by the same writer and read by
Megatron's own reader). Figures are those of the rank with the largest: ``host_mb`` and ``device_mb``, peak beyond what
was there before (on a CPU the device is host memory too; VmHWM, Linux with glibc); ``collective_mb`` of tensors that
hold values, ``metadata_mb`` of the bytes that describe them. ``share_mb`` is the parameters and the optimizer state
that a rank holds anyway. ``copy`` is what training waits for when a checkpoint is written in the background, once its
host memory exists, and ``ratio_pause`` its time ÷ that of copying as many bytes. ``ratio_save`` and ``ratio_load`` are
ours ÷ gathered. ``beyond_own_mb`` is the host memory of the copy beyond the rank's own bytes. ``interchangeable``: each
way restored, to the bit, what the other had saved. ``transfers`` is described in ``transfers.py``; it needs
the development tools (``./setup.sh --dev``), and 0 MB leaves it out. Times need a quiet machine.

    python benchmarks/checkpoint.py [--ranks 4] [--layers 4] [--hidden 512] [--vocab 65536]
        [--transfer-mb 512] [--rounds 3] [--obstore PYTHON]
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transfers
from measured import stamp
from offload import make_config
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_fleet.config.schema import ParallelConfig
from megatron_fleet.platform.communicator import TorchCommunicator
from megatron_fleet.trainer.megatron.policy import MegatronPolicy

MB = 1e6


class Collectives(TorchDispatchMode):
    """Counter of the bytes that collectives are given.

    Attributes:
        values: of floating-point tensors.
        described: of others, such as pickled objects.
    """

    def __init__(self) -> None:
        super().__init__()
        self.values = self.described = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            for tensor in tree_leaves((args, kwargs)):
                if isinstance(tensor, torch.Tensor):
                    self.values += tensor.nbytes if tensor.is_floating_point() else 0
                    self.described += 0 if tensor.is_floating_point() else tensor.nbytes
        return func(*args, **(kwargs or {}))


def resident(field: str) -> int:
    """``VmRSS`` or ``VmHWM`` of this process in bytes."""
    line = Path("/proc/self/status").read_text(encoding="ascii").partition(f"{field}:")[2]
    return int(line.split()[0]) * 1024


def measure(action: Callable[[], object]) -> dict[str, float]:
    """Figures of one action, which every rank takes."""
    gc.collect()
    # What the allocator kept would be used again without growing.
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    host = resident("VmRSS")
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
        device = torch.cuda.memory_allocated()
    TorchCommunicator().barrier()
    start = time.perf_counter()
    with Collectives() as sent:
        action()
    seconds = time.perf_counter() - start
    found = {
        "host_mb": (resident("VmHWM") - host) / MB,
        "device_mb": (torch.cuda.max_memory_allocated() - device) / MB if cuda else 0.0,
        "collective_mb": sent.values / MB,
        "metadata_mb": sent.described / MB,
        "seconds": seconds,
    }
    largest = [max(figures) for figures in zip(*(each.values() for each in gathered(found)), strict=True)]
    return {name: round(value, 3) for name, value in zip(found, largest, strict=True)}


def gathered(value: Any) -> list[Any]:
    """``value`` of every rank."""
    return TorchCommunicator().all_gather(value)


def restored(policy: MegatronPolicy, load: Callable[[], None]) -> bool:
    """Return whether ``load`` brings back the optimizer state and the parameters of all ranks, which are cleared."""
    tensors = [*optimizer_state(policy), *(p.data for chunk in policy.model_chunks for p in chunk.parameters())]
    before = [tensor.clone() for tensor in tensors]
    for tensor in tensors:
        tensor.zero_()
    load()
    # Megatron's way may put other tensors into the optimizer.
    after = [*optimizer_state(policy), *(p.data for chunk in policy.model_chunks for p in chunk.parameters())]
    return all(gathered(all(torch.equal(a, b) for a, b in zip(before, after, strict=True))))


def plain_copy_s(nbytes: int) -> float:
    """Seconds to copy as many bytes from the device to host memory, on all ranks at once; the best of three."""
    cuda = torch.cuda.is_available()
    source = torch.ones(nbytes, dtype=torch.uint8, device="cuda" if cuda else "cpu")
    target = torch.ones(nbytes, dtype=torch.uint8, pin_memory=cuda)
    return min(measure(lambda: target.copy_(source))["seconds"] for _ in range(3))


def optimizer_state(policy: MegatronPolicy) -> list[torch.Tensor]:
    return [
        tensor
        for part in policy._optimizer.chained_optimizers
        for state in part.optimizer.state.values()
        for tensor in state.values()
    ]


def in_this_process() -> Any:
    """Megatron's saving of shards, without the helper process that its own writer starts."""
    from megatron.core.dist_checkpointing.strategies import torch as strategies
    from torch.distributed import checkpoint

    class LocalSave(strategies.TorchDistSaveShardedStrategy):
        def save(self, sharded_state_dict: Any, checkpoint_dir: Path) -> None:
            state, _, _ = strategies._replace_state_dict_keys_with_sharded_keys(
                sharded_state_dict, self.keep_only_main_replica
            )
            checkpoint.save(
                strategies.mcore_to_pyt_state_dict(state, False),
                storage_writer=checkpoint.FileSystemWriter(checkpoint_dir),
                planner=strategies.MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
            )

    return LocalSave("torch_dist", 1)


class Gathering:
    """Checkpoints as Megatron-Core makes them."""

    def __init__(self, policy: MegatronPolicy) -> None:
        self._chunks, self._optimizer = policy.model_chunks, policy._optimizer

    def save(self, path: Path) -> None:
        from megatron.core import dist_checkpointing
        from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper

        strategy = FullyParallelSaveStrategyWrapper(in_this_process(), self._group())
        path.mkdir(parents=True, exist_ok=True)
        dist_checkpointing.save(self._described(is_loading=False), str(path), strategy)

    def load(self, path: Path) -> None:
        from megatron.core import dist_checkpointing
        from megatron.core.dist_checkpointing.serialization import get_default_load_sharded_strategy
        from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelLoadStrategyWrapper

        strategy = FullyParallelLoadStrategyWrapper(get_default_load_sharded_strategy(str(path)), self._group())
        found = dist_checkpointing.load(self._described(is_loading=True), str(path), strategy)
        self._chunks[0].load_state_dict(found["model"], strict=False)
        self._optimizer.load_state_dict(found["optimizer"])

    def _group(self) -> Any:
        from megatron.core import parallel_state

        return parallel_state.get_data_parallel_group(with_context_parallel=True)

    def _described(self, is_loading: bool) -> dict[str, Any]:
        from megatron_fleet.trainer.megatron.state import CONTENT

        metadata = dict(CONTENT, dp_cp_group=self._group())
        model = self._chunks[0].sharded_state_dict(metadata=metadata)
        state = self._optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=metadata)
        return {"model": model, "optimizer": state}


def run_rank(rank: int, port: int, args: argparse.Namespace, folder: str) -> None:
    """Measure as one of the ranks; the first writes the report."""
    from megatron_fleet.platform.megatron.adapt import cuda_calls_answered

    warnings.filterwarnings("ignore")
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(args.ranks), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    config = make_config(f"{folder}/{rank}", args.layers, args.hidden, args.vocab)
    config = config.model_copy(update={"parallel": ParallelConfig(data=args.ranks)})
    policy = MegatronPolicy(config, init="random")
    for tensor in optimizer_state(policy):
        tensor.normal_()  # memory that was never written does not count as resident
    sizes = policy.train_state().sizes()
    report: dict[str, Any] = {"share_mb": round((sizes["parameters"] + sizes["optimizer"]) / MB, 1)}
    ours, theirs = Path(folder, "ours"), Path(folder, "gathered")
    megatron = Gathering(policy)
    measure(lambda: torch.zeros(1).detach())  # the first counted operation imports PyTorch's compiler
    report["ours"] = {
        "save": measure(lambda: policy.save_state(ours)),
        "load": measure(lambda: policy.load_state(ours)),
    }
    # The first copy allocates its memory.
    copies = [measure(lambda: policy.begin_save(Path(folder, "copied"), copy=True)) for _ in range(4)]
    report["ours"]["copy"] = {**copies[0], "seconds": min(copy["seconds"] for copy in copies[1:])}
    with cuda_calls_answered():
        report["gathered"] = {
            "save": measure(lambda: megatron.save(theirs)),
            "load": measure(lambda: megatron.load(theirs)),
        }
        report["interchangeable"] = restored(policy, lambda: megatron.load(ours))
    report["interchangeable"] &= restored(policy, lambda: policy.load_state(theirs))
    for verb in ("save", "load"):
        one, other = (
            sum(report[way][verb][f"{kind}_mb"] for kind in ("host", "device")) for way in ("ours", "gathered")
        )
        report[f"ratio_{verb}"] = round(one / other, 4)
    own = max(
        gathered(sum(file["bytes"] for file in policy.begin_save(Path(folder, "own"), copy=False).write().values()))
    )
    report["own_mb"] = round(own / MB, 1)
    report["beyond_own_mb"] = round(report["ours"]["copy"]["host_mb"] - own / MB, 1)
    report["ratio_pause"] = round(report["ours"]["copy"]["seconds"] / plain_copy_s(own), 3)
    if rank == 0:
        given = {name: getattr(args, name) for name in ("ranks", "layers", "hidden", "vocab")}
        Path(folder, "report.json").write_text(json.dumps({"benchmark": "checkpoint", **report, **given}))
    policy.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--vocab", type=int, default=65536)
    parser.add_argument("--transfer-mb", type=int, default=512, help="MB that are copied to a store; 0: none")
    parser.add_argument("--rounds", type=int, default=3, help="of the copies to a store")
    parser.add_argument("--obstore", metavar="PYTHON", help="interpreter that has the package obstore")
    args = parser.parse_args()
    if args.transfer_mb:
        transfers.check_server()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(args.ranks):
            Path(folder, str(rank)).mkdir()
        torch.multiprocessing.spawn(run_rank, (store.port, args, folder), args.ranks)
        report = json.loads(Path(folder, "report.json").read_text())
    if args.transfer_mb:
        with tempfile.TemporaryDirectory() as folder:
            report["transfers"] = transfers.measure(Path(folder), args.transfer_mb << 20, args.rounds, args.obstore)
    print(json.dumps(report | stamp(__file__)), flush=True)


if __name__ == "__main__":
    main()

"""Reader of Megatron's ``torch_dist`` shards as data: nothing named in a file is imported or called.

By default torch unpickles ``.metadata`` and the objects among the shards (``FileSystemReader.read_metadata``,
``DefaultLoadPlanner.load_bytes``): anyone who can write into a checkpoint's folder could run code on every rank.
"""

from __future__ import annotations

from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any, NoReturn

import torch
from megatron.core.dist_checkpointing.dict_utils import merge, nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedBase,
    ShardedObject,
    ShardedStateDict,
    ShardedTensor,
    StateDict,
    apply_factory_merges,
)
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelLoadStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreLoadPlanner,
    TorchDistLoadShardedStrategy,
    _replace_sharded_keys_with_state_dict_keys,
    _replace_state_dict_keys_with_sharded_keys,
    _restore_dict_types,
    _unwrap_pyt_sharded_tensor,
    mcore_to_pyt_state_dict,
)
from megatron.core.dist_checkpointing.utils import extract_sharded_base, force_all_tensors_to_non_fp8
from megatron.core.dist_checkpointing.validation import determine_global_metadata, validate_sharding_integrity
from torch.distributed import checkpoint as torch_checkpoint
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from megatron_fleet.config.errors import UserError
from megatron_fleet.platform.communicator import ProcessGroup
from megatron_fleet.storage.local import LocalFolder
from megatron_fleet.weights.torch_dist.dtypes import DTYPES
from megatron_fleet.weights.torch_dist.index import COMMON, ChunkedTensor, read_places


def read_metadata(path: Path) -> Metadata:
    """Read the location of each part of a checkpoint.

    Raises:
        UserError: ``.metadata`` or ``metadata.json`` is damaged, or contains unexpected objects.
    """
    folder = LocalFolder(path)
    tensors, objects = read_places(folder.read, folder.sizes(), str(path))
    entries: dict[str, Any] = {key: _tensor_entry(stored) for key, stored in tensors.items()}
    entries |= {key: BytesStorageMetadata() for key in objects}
    places = {
        MetadataIndex(key, chunk.offsets): _StorageInfo(chunk.file, chunk.offset, chunk.length)
        for key, stored in tensors.items()
        for chunk in stored.chunks
    }
    places |= {MetadataIndex(key): _StorageInfo(*blob) for key, blob in objects.items()}
    return Metadata(entries, storage_data=places)


def _tensor_entry(stored: ChunkedTensor) -> TensorStorageMetadata:
    chunks = [ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes)) for chunk in stored.chunks]
    properties = TensorProperties(getattr(torch, DTYPES[stored.dtype].torch))
    return TensorStorageMetadata(properties, torch.Size(stored.shape), chunks)


def load(described: StateDict, path: Path, metadata: Metadata, group: ProcessGroup) -> StateDict:
    """Fill in ``described``, each part read by one rank of ``group``; collective.

    Follows `dist_checkpointing.load` of Megatron-Core 0.16 to 0.19, which accepts a custom strategy for the shards, but
    not in all of these versions for the common state.

    Raises:
        UserError: the checkpoint lacks a part, or a file is damaged or holds code.
    """
    force_all_tensors_to_non_fp8(described)
    state = _load_common(path, metadata)
    described, own, factories = load_preprocess(described)
    merge(state, own)
    sharded, _ = extract_sharded_base(described)
    validate_sharding_integrity(determine_global_metadata(sharded)[1])
    merge(state, FullyParallelLoadStrategyWrapper(_ShardedLoad(metadata), group).load(sharded, path))
    return apply_factory_merges(state, factories)


class _ShardedLoad(TorchDistLoadShardedStrategy):
    """Megatron's own strategy with another reader and planner."""

    def __init__(self, metadata: Metadata) -> None:
        super().__init__()
        self._metadata = metadata

    def load(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: Path, *_: Any) -> StateDict:
        """See `TorchDistLoadShardedStrategy.load`, whose steps these are. Since 0.17 it also receives the format of the
        save.
        """
        tensors = [value for value in nested_values(sharded_state_dict) if isinstance(value, ShardedTensor)]
        state, structure, names = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict)
        for key, parts in state.items():
            if not _fits(parts[0], self._metadata.state_dict_metadata.get(key)):
                raise UserError(
                    f"{checkpoint_dir}: holds no {key} as the model has it; train as this run began, or choose another "
                    f"run.out."
                )
        found = mcore_to_pyt_state_dict(state, True)
        torch_checkpoint.load(
            found,
            storage_reader=_Reader(checkpoint_dir, self._metadata),
            planner=_Planner(
                shapes_validation_sharded_tensors=[t for t in tensors if not t.allow_shape_mismatch],
                allow_shape_mismatch_sharded_tensors={t.key: t for t in tensors if t.allow_shape_mismatch},
            ),
        )
        self.cached_global_metadata = self._metadata
        unwrapped = {key: _unwrap_pyt_sharded_tensor(value) for key, value in found.items()}
        for key, value in unwrapped.items():
            if not isinstance(value, list) or len(value) != len(names[key]):
                raise UserError(
                    f"{checkpoint_dir}: {key} is not an object that Megatron saves; use another checkpoint."
                )
        loaded = _replace_sharded_keys_with_state_dict_keys(unwrapped, structure, names)
        _restore_dict_types(loaded, sharded_state_dict)
        return loaded


def _fits(wanted: ShardedBase, entry: TensorStorageMetadata | BytesStorageMetadata | None) -> bool:
    if not isinstance(wanted, ShardedTensor):
        return isinstance(entry, BytesStorageMetadata)
    if not isinstance(entry, TensorStorageMetadata):
        return False
    return wanted.allow_shape_mismatch or tuple(entry.size) == tuple(wanted.global_shape)


def _load_common(path: Path, metadata: Metadata) -> StateDict:
    """Read the state common to all ranks. Up to 0.18 it is a file; since 0.19 an object among the shards.

    Raises:
        UserError: it cannot be read.
    """
    file = path / COMMON
    if file.exists():
        try:
            # Explicit, because an environment variable turns torch's default into unpickling.
            common = torch.load(file, map_location="cpu", weights_only=True)
        except OSError:
            raise
        except Exception as error:
            _refuse(file, error)
    else:
        place = ShardedObject("common_state", None, (1,), (0,))
        common = _ShardedLoad(metadata).load({"common": place}, path)["common"]
    if not isinstance(common, dict):
        raise UserError(f"{file}: holds no dict; use another checkpoint.")
    return common


class _Reader(torch_checkpoint.FileSystemReader):
    def __init__(self, path: Path, metadata: Metadata) -> None:
        super().__init__(path)
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read file by file, so that an error can name the file."""
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        for name, items in by_file.items():
            try:
                super().read_data(replace(plan, items=items), planner)
            except OSError:
                raise
            except Exception as error:
                _refuse(Path(self.path, name), error)
        done: Future[None] = Future()
        done.set_result(None)
        return done


class _Planner(MCoreLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: BytesIO) -> None:
        """See `DefaultLoadPlanner`, whose own method calls whatever the object names."""
        path = self.mappings[read_item.dest_index.fqn]
        set_element(self.original_state_dict, path, torch.load(value, map_location="cpu", weights_only=True))


def _refuse(file: Path, error: Exception) -> NoReturn:
    """Raise UserError: torch's own message is pages of advice on loading the file anyway."""
    raise UserError(
        f"{file}: is damaged, or holds something other than tensors and plain values ({type(error).__name__}), so do "
        f"not trust its source; use another checkpoint."
    ) from error

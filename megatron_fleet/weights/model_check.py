"""Checks of a model folder before anything is started or written: one function for runs, one for conversions.

They read ``config.json``, the headers of the safetensors files and the tokenizer. Of the data they read only tensors
that must equal another one, such as the head of a model with tied embeddings that is stored all the same.
"""

from __future__ import annotations

import gc
import logging
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from megatron_fleet.config.errors import UserError
from megatron_fleet.config.files import read_object
from megatron_fleet.config.remote_model import remote_model
from megatron_fleet.config.schema import LoraConfig, ModelConfig, RunConfig
from megatron_fleet.config.sections.rollout import SpeculativeConfig
from megatron_fleet.models.hf_config import declared_quantization, read_model
from megatron_fleet.models.registry import use_family
from megatron_fleet.storage.folder import Readable
from megatron_fleet.storage.open import open_folder
from megatron_fleet.weights.fetch.cache import at_source
from megatron_fleet.weights.fetch.hub import HeadersUnavailable
from megatron_fleet.weights.fetch.listing import has_weights
from megatron_fleet.weights.hf_folder import INDEX, ITEM_BYTES, read_config, read_weight_map
from megatron_fleet.weights.hf_model import Fp8, HfModel, Int4, Plain, check_quantization, make_table, open_model
from megatron_fleet.weights.mapping import Interval
from megatron_fleet.weights.torch_dist.index import METADATA

SPAN_BYTES = 1 << 20
SPANS = 32
"""Parts of a large tensor that are compared with those of the tensor that it must equal."""
_STEP = re.compile(r"step_(\d+)")
log = logging.getLogger(__name__)


def check_model(model: ModelConfig, speculative: SpeculativeConfig, tokenizer: bool = True) -> HfModel | None:
    """Refuse a run or an evaluation whose model folder trainer or engines could not load.

    Args:
        tokenizer: compare its ids with the embedding, too, for which packages of the engine environment are needed.

    Returns:
        The model; ``None`` where neither its weights are on this host nor their headers can be read at the source.

    Raises:
        UserError: names file, tensor or field, and what to do.
    """
    use_family(model.family)
    folder: Readable = open_folder(model.folder)
    drafts = speculative.method == "mtp"
    if drafts and not read_model(read_config(folder)).mtp:
        raise UserError(
            "rollout.engine.speculative.method=mtp: this model has no multi-token prediction layers; set it to ngram "
            "or none."
        )
    try:
        opened = open_checked(_with_weights(model, folder), whole=False, prediction=drafts)
    except HeadersUnavailable as reason:
        log.warning("%s Only config.json and the index of the weights were checked.", reason)
        _check_listed(folder, folder.sizes())
        return None
    if drafts and not opened.table.model.mtp:
        raise UserError(
            f"rollout.engine.speculative.method=mtp: no file in model.path={model.path} has the multi-token "
            f"prediction layers that config.json announces; set it to ngram or none, or use a release with them."
        )
    _check_for_engines(opened, opened.folder.sizes())
    if tokenizer:
        _check_ids(model.folder, opened)
    return opened


def _with_weights(model: ModelConfig, folder: Readable) -> Readable:
    """Return ``folder``, or the source of a model whose weights are not on this host, as in a dry run.

    Raises:
        HeadersUnavailable: the user forbids requests to it.
    """
    if remote_model(model.path) is None or has_weights(folder.sizes()):
        return folder
    found = at_source(model.path)
    if found is None:
        raise HeadersUnavailable(
            f"model.path={model.path}: HF_HUB_OFFLINE is set, so the headers of the weights cannot be read."
        )
    return found


def open_checked(place: Readable | Path | str, *, whole: bool, prediction: bool = True) -> HfModel:
    """Open a folder as `open_model`, and compare the tensors that must equal another one with it.

    Args:
        whole: compare all of their values; otherwise those of `SPANS` parts of each.
        prediction: also those of multi-token prediction layers.

    Raises:
        UserError: see `open_model`; or a tensor is there twice, with different values.
    """
    with _uncollected():
        model = open_model(place)
    for name, original in model.table.repeated.items():
        if name in model.stored and (prediction or not model.table.has_prediction([name])):
            row = _first_difference(model, name, original, whole)
            if row is not None:
                raise UserError(_contradiction(model, name, original, row))
    return model


@contextmanager
def _uncollected() -> Iterator[None]:
    """Switch the collector of cycles off: of a trillion parameters it would look through a million new objects."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _contradiction(model: HfModel, name: str, original: str, row: int) -> str:
    where = f"{model.folder.url}/{model.stored[name].file}: {name} differs from {original} (first in row {row})"
    if model.table.has_prediction([name]):
        return f"{where}, and both are one tensor in this model; use another release."
    return (
        f"{where}, and tie_word_embeddings=true in config.json makes them one; set it to false if the head was trained "
        f"by itself, or remove {name} from the files."
    )


def _first_difference(model: HfModel, name: str, original: str, whole: bool) -> int | None:
    """Row of a copy's first value that is not its original's; ``None``: there is none in what is compared."""
    import numpy as np

    from megatron_fleet.weights.floats import cast
    from megatron_fleet.weights.hf_rows import HfReader

    stored = model.stored[name]
    both = replace(model, encodings={**model.encodings, name: Plain(stored)})
    readers = HfReader(both), HfReader(both)
    row_bytes = math.prod(stored.shape[1:]) * ITEM_BYTES[stored.dtype]
    for rows in _spans(stored.shape[0], row_bytes, whole):
        values = (reader.read_rows(tensor, rows) for reader, tensor in zip(readers, (name, original), strict=True))
        kinds = (reader.dtype(tensor) for reader, tensor in zip(readers, (name, original), strict=True))
        ours, theirs = (cast(part, kind, "F32") for part, kind in zip(values, kinds, strict=True))
        differs = ours.view(np.uint32) != theirs.view(np.uint32)
        if differs.any():
            return rows[0] + int(np.argwhere(differs)[0][0])
    return None


def _spans(rows: int, row_bytes: int, whole: bool) -> Iterator[Interval]:
    """Rows to compare: all, or the first, the last and those of `SPANS` places at equal distances."""
    step = max(1, SPAN_BYTES // max(1, row_bytes))
    starts: Sequence[int] = range(0, rows, step)
    if not whole and len(starts) > SPANS:
        starts = sorted({starts[k * (len(starts) - 1) // (SPANS - 1)] for k in range(SPANS)})
    for start in starts:
        yield start, min(start + step, rows)


def _check_listed(folder: Readable, sizes: Mapping[str, int]) -> None:
    """Refuse what config and index, without the files that it lists, tell of a model."""
    config = read_config(folder)
    names = read_weight_map(folder) if INDEX in sizes else {}
    check_quantization(folder, config, names)
    table = make_table(config, names)
    for tensor in table.tensors if names else ():
        stack = table.stacked.get(tensor)
        packed = f"{tensor.removesuffix('.weight')}.weight_packed"
        if not {tensor, packed, tensor if stack is None else stack.tensor} & names.keys():
            raise UserError(f"{folder.url}/{INDEX}: tensor {tensor} is not listed; use the files of config.json.")


def _check_for_engines(model: HfModel, sizes: Mapping[str, int]) -> None:
    """Refuse what the engines, which go by config.json and read every file, would take for another model."""
    url = model.folder.url
    if INDEX not in sizes:
        used = {stored.file for stored in model.stored.values()}
        for name in sizes:
            if "/" not in name and name.endswith(".safetensors") and name not in used:
                raise UserError(
                    f"{url}/{name} is next to {', '.join(sorted(used))}, and engines would load both; move it to "
                    f"another folder."
                )
    elif copies := sorted(name for name in sizes if re.fullmatch(r"consolidated.*\.safetensors", name)):
        raise UserError(
            f"{url}/{copies[0]}: engines would load it instead of the files that {INDEX} lists; move it to "
            f"another folder."
        )
    declared = declared_quantization(model.config)
    for kind, method in ((Fp8, "fp8"), (Int4, "compressed-tensors")):
        stored = next((name for name, encoding in model.encodings.items() if isinstance(encoding, kind)), None)
        says = any(part.get("quant_method") == method for part in declared)
        if stored is not None and not says:
            raise UserError(
                f"{url}/config.json has no quantization_config of {method}, and {stored} is stored so; engines would "
                f"take its codes for weights. Use the config.json that belongs to the weights."
            )
        if stored is None and says:
            raise UserError(
                f"{url}/config.json: quantization_config says {method}, and no tensor is stored so; remove it, or use "
                f"the files that belong to config.json."
            )


def _check_ids(folder: str, model: HfModel) -> None:
    """Refuse ids of the tokenizer, and of the ends of turns, that the embedding has no row for."""
    from megatron_fleet.models.chat.tokenizer import Tokenizer

    rows, named = model.table.model.vocab, f"the {model.table.model.vocab} rows of the embedding"
    tokenizer = Tokenizer(folder)
    if tokenizer.vocab_size > rows:
        beyond = [token for token, number in tokenizer.special.items() if number >= rows]
        example = f", among them {beyond[0]}" if beyond else ""
        raise UserError(
            f"model.path={folder}: the tokenizer has ids up to {tokenizer.vocab_size - 1}{example}, beyond {named}; "
            f"use the tokenizer that belongs to the weights, or resize the embedding."
        )
    ends = {}
    for name in ("config.json", "generation_config.json"):
        path = Path(folder, name)
        found = read_object(path, "fetch the model again").get("eos_token_id") if path.is_file() else None
        ends[name] = {end for end in (found if isinstance(found, list) else [found]) if isinstance(end, int)}
        if beyond_rows := sorted(end for end in ends[name] if end >= rows):
            raise UserError(f"{path}: eos_token_id={beyond_rows[0]} is beyond {named}; correct the file.")
    _tell_contradictions(folder, *ends.values())


def _tell_contradictions(folder: str, ours: set[int], theirs: set[int]) -> None:
    """Warn of files that say different things, and which of them counts.

    Args:
        ours, theirs: ids that end a turn by config.json and by generation_config.json.
    """
    from megatron_fleet.models.chat.detection import read_templates

    if ours and theirs and not ours & theirs:
        log.warning(
            "%s: eos_token_id is %s in config.json and %s in generation_config.json; neither is used: turns end at the "
            "stop tokens of the chat format",
            folder,
            sorted(ours),
            sorted(theirs),
        )
    (taken, template), *others = [*read_templates(folder)] or [("", "")]
    for name, other in others:
        if other != template:
            log.warning("%s: using the chat template in %s, which differs from that in %s", folder, taken, name)


def check_resumed(run: RunConfig, lora: LoraConfig, model: HfModel) -> None:
    """Refuse to resume from a checkpoint of another model: the newest one in ``run.out``, or that of ``run.resume``.

    Only the index of the checkpoint is read.

    Raises:
        UserError: it has other tensors than this run, or only one of both has adapters.
    """
    if run.resume == "never":
        return
    folder = Path(run.out, "checkpoints")
    found = {int(step[1]): path for path in folder.glob("step_*") if (step := _STEP.fullmatch(path.name))}
    wanted = run.resume if isinstance(run.resume, int) else max(found, default=0)
    if wanted not in found or not (found[wanted] / METADATA).is_file():
        return
    try:
        _check_checkpoint(found[wanted], lora.rank, model)
    except UserError as error:
        raise UserError(
            f"run.out={run.out} has a checkpoint of another run ({str(error).rstrip('.')}); choose another "
            f"--out, or the settings of that run."
        ) from None


def _check_checkpoint(path: Path, rank: int, model: HfModel) -> None:
    from megatron_fleet.weights.checkpoint_reader import MegatronCheckpoint, StoredMatrices

    checkpoint = MegatronCheckpoint(path)
    adapters = [(key, stored) for key, stored in checkpoint.index.tensors.items() if key.startswith("adapters.")]
    if bool(adapters) != (rank > 0):
        raise UserError(f"{path} holds {'adapters' if adapters else 'all parameters'}, and policy.lora.rank={rank}.")
    if not adapters:
        StoredMatrices(checkpoint, make_table(model.config, (), prediction=False))
        return
    for key, stored in adapters:
        layer, _, letter = key.removeprefix("adapters.").rpartition(".")
        matrix = model.table.find(f"{layer}.weight", (0,) * (len(stored.shape) - 2))
        wanted = (rank, matrix.shape[1]) if letter == "a" else (matrix.shape[0], rank)
        if stored.shape[-2:] != wanted:
            raise UserError(f"{path}: {key} has shape {list(stored.shape[-2:])}; this run has {list(wanted)}.")

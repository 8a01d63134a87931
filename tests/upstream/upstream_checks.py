"""What is wrong with the uses of other packages that `upstream_uses.Reader` has found."""

from __future__ import annotations

import inspect

from upstream_symbols import Symbols, signature
from upstream_uses import ADAM, Reader, Use

OFFLOADED = "Megatron's HybridDeviceOptimizer has it, which is told apart before"
EXEMPT = {
    ("models/qwen3_5/modules/megatron.py", "megatron.core.ssm.gated_delta_net:GatedDeltaNet().forward"): (
        "called by Megatron's layer alone, which names every argument but the first two"
    ),
    ("models/qwen3_5/modules/vllm.py", "vllm.model_executor.layers.linear:ColumnParallelLinear().weight"): (
        "made by the layer's quantisation method"
    ),
    (
        "platform/megatron/patches.py",
        "megatron.core.transformer.transformer_block:TransformerBlock._checkpointed_forward",
    ): "replaced only where it is: before 0.19",
    ("trainer/megatron/model.py", "megatron.core.models.gpt:GPTModel().forward"): "called by our step alone",
    ("trainer/megatron/model.py", "megatron.core.models.gpt:GPTModel()._postprocess"): (
        "called by GPTModel.forward alone, which names every argument"
    ),
    ("trainer/megatron/build.py", "megatron.core.models.gpt:GPTModel().real_vocab_size"): "we add the attribute",
    ("trainer/megatron/optimizer.py", f"{ADAM}._sync_sub_optimizers_state_to_hdo"): OFFLOADED,
    ("trainer/megatron/optimizer.py", f"{ADAM}.sub_optimizers"): OFFLOADED,
    ("trainer/megatron/lora.py", "megatron.core.models.gpt:GPTModel().adapters"): "we add the attribute",
    ("trainer/megatron/gradients.py", "megatron.core.transformer.module:MegatronModule().adapters"): "ours, see above",
    ("trainer/megatron/state.py", "megatron.core.transformer.module:MegatronModule().adapters"): "ours, see above",
}
"""(our file, the name) → why it may be missing, or may not fit."""


def faults(reader: Reader) -> dict[tuple[str, str], str]:
    """(our file, the name) → what is wrong with the use, with its line."""
    found = {(_file(where), target): f"{where}: {target}: {reason}" for where, target, reason in reader.missing}
    for use in sorted(reader.uses, key=lambda use: use.where):
        reason = _misfit(use, reader.symbols)
        if reason is not None:
            found[_file(use.where), use.target] = f"{use.where}: {use.target}: {reason}"
    return found


def _file(where: str) -> str:
    return where.partition(":")[0].removeprefix("megatron_fleet/")


def nowhere(*readers: Reader) -> dict[tuple[str, str], str]:
    """As `faults`, for uses that work without the name: there is such a name in none of the releases."""
    uses = {use for reader in readers for use in reader.uses if use.kind == "optional"}
    return {
        (_file(use.where), use.target): f"{use.where}: {use.target} exists in no release: misspelt, or not needed"
        for use in uses
        if all(reader.kind(use.target) is None for reader in readers)
    }


def _misfit(use: Use, symbols: Symbols) -> str | None:
    if use.kind == "call":
        parameters = symbols.lookup(use.target).signature
        if parameters is not None:
            bind = parameters.bind if use.exact else parameters.bind_partial
            try:
                bind(*[...] * use.positional, **dict.fromkeys(use.keywords))
            except TypeError as error:
                return str(error)
    if use.kind == "override":
        theirs = symbols.lookup(use.target).signature
        assert theirs is not None and use.accepts is not None
        return misfit(theirs, signature(use.accepts))
    return None


def misfit(theirs: inspect.Signature, ours: inspect.Signature) -> str | None:
    """Why a function of ours cannot take every call that the one in whose place it is takes; ``None`` if it can.

    A parameter of ours whose name is only underscores states that nobody passes it by name.
    """
    kinds = inspect.Parameter
    mine = list(ours.parameters.values())
    any_name = any(p.kind is kinds.VAR_KEYWORD for p in mine)
    rest = next((p.name for p in mine if p.kind is kinds.VAR_POSITIONAL), None)
    places = [p for p in mine if p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)]
    by_name = {p.name for p in mine if p.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)}
    given: set[str] = set()
    for place, parameter in enumerate(theirs.parameters.values()):
        if parameter.kind is kinds.VAR_POSITIONAL:
            if rest is None:
                return f"ours lacks *{parameter.name}"
        elif parameter.kind is kinds.VAR_KEYWORD:
            if not any_name:
                return f"ours lacks **{parameter.name}"
        elif parameter.kind is kinds.KEYWORD_ONLY:
            if parameter.name not in by_name and not any_name:
                return f"ours lacks {parameter.name}"
        elif place < len(places):
            given.add(places[place].name)
            named = parameter.kind is kinds.POSITIONAL_OR_KEYWORD and places[place].name.strip("_")
            if named and parameter.name != places[place].name:
                return f"ours calls {parameter.name} {places[place].name}"
        elif rest is None or (rest.strip("_") and not any_name and parameter.kind is not kinds.POSITIONAL_ONLY):
            return f"ours lacks {parameter.name}"
        if parameter.default is not kinds.empty and place < len(places) and _required(places[place]):
            return f"ours requires {places[place].name}"
        given.add(parameter.name)
    return next((f"ours requires {p.name}" for p in mine if _required(p) and p.name not in given), None)


def _required(parameter: inspect.Parameter) -> bool:
    variable = parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return parameter.default is inspect.Parameter.empty and not variable

"""Reading of the arguments that Megatron-LM stores in its checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from megatron_fleet.config.errors import UserError

_MOST = 1 << 40
_MOST_LAYERS = 1000
"""Upper bound, beyond any model's."""


class StoredArguments:
    """Reader of the arguments that Megatron-LM stores in its checkpoints."""

    def __init__(self, args: Mapping[str, Any]) -> None:
        self._args = args

    def take(self, name: str, default: Any = None) -> Any:
        """Return an argument; ``default`` where it is absent."""
        value = self._args.get(name)
        return default if value is None else _plain(name, value)

    def need(self, *names: str) -> Any:
        """Return the first of the named arguments that is present: releases use different names for some."""
        for name in names:
            if self._args.get(name) is not None:
                return _plain(name, self._args[name])
        raise UserError(f"checkpoint argument {names[0]} is missing; give --template with the model's HF folder.")

    def only(self, name: str, *wanted: Any) -> Any:
        """Return an argument, checked to be one of ``wanted``."""
        value = self.take(name)
        if value not in wanted:
            choice = " or ".join(repr(w) for w in wanted)
            raise UserError(f"checkpoint argument {name}={value!r} is not supported, only {choice}.")
        return value

    def pattern(self, name: str, value: Any, every: Callable[[int, int], bool]) -> tuple[bool, ...]:
        """Whether each layer is of a kind, as ``value`` of the argument ``name`` says: a list, or a stride.

        Args:
            every: whether a layer (from 0) is of the kind, given the stride.
        """
        layers = self.need("num_layers")
        if type(value) is int and value and type(layers) is int and layers <= _MOST_LAYERS:
            value = [every(i, value) for i in range(layers)]
        if not isinstance(value, list) or len(value) != layers or not any(value):
            raise UserError(f"checkpoint argument {name}={value!r} does not fit num_layers={layers}.")
        return tuple(map(bool, value))


def _plain(name: str, value: Any) -> Any:
    """Check that ``value`` is a number, a string or a list of them (a pickle may hold anything); return it."""
    parts = value if isinstance(value, list | tuple) and len(value) <= _MOST_LAYERS else [value]
    if any(type(part) not in (bool, int, float, str) or (type(part) is int and abs(part) > _MOST) for part in parts):
        raise UserError(
            f"checkpoint argument {name} is a {type(value).__name__} that no known model has; give --template with the "
            f"model's HF folder."
        )
    return value

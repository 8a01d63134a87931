"""Type of a validation rule."""

from __future__ import annotations

from collections.abc import Callable

from megatron_fleet.config.schema import Config

Rule = Callable[[Config], str | None]
"""Returns an error message that names the keys, their values and the fix, or ``None``."""

"""What a rule is."""

from __future__ import annotations

from collections.abc import Callable

from megatron_fleet.config.schema import Config

Rule = Callable[[Config], str | None]
"""Names the keys, their values and the way out; ``None`` when there is nothing to refuse."""

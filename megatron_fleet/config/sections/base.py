"""Base class of the configuration sections."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

MAX_TOKENS = 1 << 26
"""Largest length in tokens: far above what any model or device takes."""


class Section(BaseModel):
    """Base of all sections: unknown keys are errors, values are immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

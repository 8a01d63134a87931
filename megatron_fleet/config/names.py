"""Names of parts in the configuration: one of ours, or the path of a user's own."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", re.ASCII)


@dataclass(frozen=True, slots=True)
class NameOrPath:
    """Annotation of a text field: one of ``names``, or the ``package.module:name`` of a user's object.

    Attributes:
        more: further names, in words; the registry that knows them refuses others before a run starts.
    """

    names: tuple[str, ...]
    more: str | None = None

    @property
    def spelt(self) -> str:
        """Accepted values, in words."""
        names = [*self.names, *([] if self.more is None else [self.more])]
        ours = f"one of {', '.join(names)} or " if names else ""
        return f"{ours}package.module:name"

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        from pydantic_core import core_schema

        return core_schema.no_info_after_validator_function(self._checked, handler(source))

    def _checked(self, value: str) -> str:
        if self.more is None and value not in self.names and not is_path(value):
            raise ValueError(f"not {self.spelt}")
        return value


def is_path(name: str) -> bool:
    """Return whether ``name`` has the form ``package.module:name``."""
    return _PATH.fullmatch(name) is not None

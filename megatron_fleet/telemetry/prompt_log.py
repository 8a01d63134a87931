"""Log of one complete first prompt per environment, to inspect what the policy actually sees."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_fleet.config.names import environment_name
from megatron_fleet.storage.local import write_atomically

if TYPE_CHECKING:
    from megatron_fleet.agents.trajectory import Group


class PromptLog:
    """Writer of ``prompts/ENVIRONMENT.txt``: the first prompt of the first episode with one, control tokens visible."""

    def __init__(self, folder: Path, decode: Callable[[Sequence[int]], str]) -> None:
        """``decode``: text of token ids. Files of an earlier attempt are replaced."""
        self._folder, self._decode = folder, decode
        self._written: set[str] = set()

    def write(self, groups: Sequence[Group]) -> None:
        """Write the prompts of environments not seen before."""
        for trajectory in (t for group in groups for t in group.trajectories):
            env = environment_name(trajectory.env_key)
            if env in self._written or not trajectory.spans:
                continue
            prompt = trajectory.token_ids[: trajectory.spans[0].end].tolist()
            self._folder.mkdir(parents=True, exist_ok=True)
            write_atomically(self._folder / f"{env}.txt", self._decode(prompt).encode())
            self._written.add(env)

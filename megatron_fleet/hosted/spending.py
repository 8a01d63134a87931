"""Costs of a run at the service, and its budget."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path

from megatron_fleet.config.files import read_object
from megatron_fleet.hosted.prices import Prices, Tokens
from megatron_fleet.storage.local import write_atomically
from megatron_fleet.trainer.base import BudgetSpent

SPENT = "hosted_tokens.json"
"""File of ``run.out`` with the tokens billed so far. Resuming from a checkpoint does not reset them, because steps that
are repeated are billed again."""


class Spending:
    """`trainer.base.Spending` of one run. Metrics have the names of Thinking Machines' cookbook.

    Attributes:
        tokens: all so far.

    Not counted: requests whose answer was lost, and, if the controller is killed, what was sampled since the last step.
    """

    def __init__(self, file: Path, prices: Prices | None, budget_usd: float | None) -> None:
        """
        Args:
            file: has the tokens of earlier attempts, if it exists.
            prices: ``None``: not known; tokens are counted all the same.
            budget_usd: ``None``: no limit.
        """
        self._file, self.prices, self._budget = file, prices, budget_usd
        self.tokens = Tokens(**read_object(file, "remove it")) if file.exists() else Tokens()
        self._step = Tokens()

    @property
    def usd(self) -> float | None:
        return None if self.prices is None else self.prices.usd(self.tokens)

    def add(self, tokens: Tokens) -> None:
        """Count tokens, and write the new totals."""
        self._step, self.tokens = self._step + tokens, self.tokens + tokens
        write_atomically(self._file, json.dumps(asdict(self.tokens)).encode())

    def at_least(self, tokens: Tokens) -> None:
        """Raise each total to at least that of ``tokens``, which another machine counted."""
        more = (max(0, getattr(tokens, f.name) - getattr(self.tokens, f.name)) for f in fields(Tokens))
        self.tokens += Tokens(*more)
        write_atomically(self._file, json.dumps(asdict(self.tokens)).encode())

    def record(self, engines: Mapping[str, float]) -> dict[str, float]:
        """See `trainer.base.Spending.record`."""
        counts = (engines[f"engine/{name}"] for name in ("generated_tokens", "cached_prompt_tokens", "prompt_tokens"))
        self.add(Tokens(*map(int, counts)))
        step, self._step = self._step, Tokens()
        found = {f"tokens/{name}": float(number) for name, number in asdict(step).items()}
        found |= {f"tokens/cumulative/{name}": float(number) for name, number in asdict(self.tokens).items()}
        if self.prices is not None:
            found |= {"cost/step_usd": self.prices.usd(step), "cost/cumulative_usd": self.prices.usd(self.tokens)}
        return found

    def check(self) -> None:
        """See `trainer.base.Spending.check`."""
        if self._budget is not None and self.usd is not None and self.usd >= self._budget:
            raise BudgetSpent(
                f"hosted.budget_usd={self._budget:g}: this run has spent {self.usd:.2f} US dollars at the service; "
                f"with a larger budget, the same command resumes from the newest checkpoint."
            )

"""Tokens that the service bills, and their prices.

Four kinds are billed, and one token more than once: a prompt at every turn, less where it is in the prefix cache; what
is sampled; and all of a sequence when it is trained on.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, fields

from megatron_fleet.config.errors import UserError
from megatron_fleet.config.sections.hosted import HostedConfig
from megatron_fleet.hosted.address import address

log = logging.getLogger(__name__)

PRICE_LIST = "https://tinker-docs.thinkingmachines.ai/tinker/models.json"
"""Thinking Machines' prices: a list of objects with `tinker_id`, and strings such as ``$0.195`` for each kind."""
ANSWER_S = 5.0


@dataclass(frozen=True, slots=True)
class Tokens:
    """Billed tokens.

    Attributes:
        sampled: tokens that were sampled.
        prefill_cached: tokens of prompts that were found in the prefix cache.
        prefill_uncached: all other tokens of prompts, those of scored sequences included.
        trained: tokens of training sequences, for each pass over them.
    """

    sampled: int = 0
    prefill_cached: int = 0
    prefill_uncached: int = 0
    trained: int = 0

    def __add__(self, other: Tokens) -> Tokens:
        return Tokens(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def times(self, number: int) -> Tokens:
        return Tokens(*(getattr(self, f.name) * number for f in fields(self)))


@dataclass(frozen=True, slots=True)
class Prices:
    """US dollars for a million tokens of each kind."""

    prefill: float
    cached_prefill: float
    sample: float
    train: float

    def usd(self, tokens: Tokens) -> float:
        return (
            tokens.prefill_uncached * self.prefill
            + tokens.prefill_cached * self.cached_prefill
            + tokens.sampled * self.sample
            + tokens.trained * self.train
        ) / 1e6


def find_prices(hosted: HostedConfig, model: str) -> Prices:
    """Return the prices of a model: those of the configuration, else of Thinking Machines' list for their service.

    Args:
        model: its name at the service.

    Raises:
        LookupError: they are not known, with the reason.
    """
    given = hosted.prices.model_dump()
    if None not in given.values():
        return Prices(**given)
    if (url := address(hosted)) is not None:
        raise LookupError(f"there is no list of the prices at {url}")
    return listed_prices(model, PRICE_LIST)


def prices_of_run(hosted: HostedConfig, model: str) -> Prices | None:
    """`find_prices`; ``None``: they are not known, which is logged.

    Raises:
        UserError: they are not known, but there is a budget.
    """
    try:
        return find_prices(hosted, model)
    except LookupError as error:
        if hosted.budget_usd is not None:
            raise UserError(
                f"hosted.budget_usd={hosted.budget_usd:g}: the prices of {model} are not known ({error}); set "
                f"hosted.prices."
            ) from None
        log.warning("the prices of %s are not known (%s): tokens are counted, costs are not", model, error)
        return None


def listed_prices(model: str, url: str) -> Prices:
    """Raises LookupError: the list cannot be read, or lacks prices of the model."""
    import httpx

    try:
        answer = httpx.get(url, headers={"User-Agent": "megatron_fleet"}, timeout=ANSWER_S).raise_for_status()
        entry = next((row for row in answer.json() if row["tinker_id"] == model), None)
        if entry is None:
            raise LookupError(f"{url} does not list it")
        return Prices(**{f.name: dollars(entry[f.name]) for f in fields(Prices)})
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError) as error:
        reason = str(error).partition("\n")[0]  # httpx adds a second line of advice
        raise LookupError(f"{url} cannot be read: {type(error).__name__}: {reason}") from error


def dollars(text: object) -> float:
    """``$1,000.50`` → 1000.5. Raises ValueError: it is something else."""
    return float(str(text).strip().lstrip("$").replace(",", ""))

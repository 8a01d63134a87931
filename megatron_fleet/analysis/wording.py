"""Number formatting shared by the page, Markdown and the terminal."""

from __future__ import annotations

from megatron_fleet.analysis.statistics import Estimate

NOTHING = "–"


def rate(estimate: Estimate | None, *, signed: bool = False) -> str:
    """Format as ``0.455 [0.391, 0.520]``; without the interval if there is none."""
    if estimate is None:
        return NOTHING
    form = "+.3f" if signed else ".3f"
    if estimate.low is None or estimate.high is None:
        return _fixed(estimate.value, form)
    return f"{_fixed(estimate.value, form)} [{_fixed(estimate.low, form)}, {_fixed(estimate.high, form)}]"


def value(estimate: Estimate | None, *, signed: bool = False) -> str:
    return NOTHING if estimate is None else _fixed(estimate.value, "+.3f" if signed else ".3f")


def interval(estimate: Estimate | None) -> str:
    if estimate is None or estimate.low is None or estimate.high is None:
        return ""
    return f"[{_fixed(estimate.low, '.3f')}, {_fixed(estimate.high, '.3f')}]"


def _fixed(number: float, form: str) -> str:
    """Round to three decimals, without ``-0.000`` for values that round to 0."""
    return format(round(number, 3) + 0.0, form)


def duration(seconds: float | None) -> str:
    """Format the two largest units: ``7 min 41 s``, ``3 h 12 min``, ``2 d 4 h``."""
    if seconds is None:
        return NOTHING
    whole = round(seconds)
    for name, size, smaller, part in (("d", 86400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if whole >= size:
            return f"{whole // size} {name} {whole % size // part} {smaller}"
    return f"{whole} s"


def percent(share: float | None) -> str:
    return NOTHING if share is None else f"{100 * share:.0f} %"


def number(amount: float | None) -> str:
    """Format with thousands separators; one decimal below 100."""
    if amount is None:
        return NOTHING
    return f"{amount:,.0f}" if amount >= 100 or float(amount).is_integer() else f"{amount:.1f}"

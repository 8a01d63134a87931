"""Quantities as people read them."""

from __future__ import annotations


def size(nbytes: float) -> str:
    """Return bytes with a unit of 1000s that leaves one to three digits before the point: ``1.3 MB``."""
    value, unit = float(nbytes), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"


def count(number: int, noun: str) -> str:
    """Return a number with its noun: ``1 step``, ``1,200 steps``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"

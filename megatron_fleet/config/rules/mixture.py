"""Validation rules for `data.mixture`, including the curriculum."""

from __future__ import annotations

from megatron_fleet.config.rules.rule import Rule
from megatron_fleet.config.schema import Config


def _temperature(c: Config) -> str | None:
    m = c.data.mixture
    if m.weights == "temperature" and m.temperature is None:
        return (
            "data.mixture.weights=temperature needs a temperature; add data.mixture.temperature=… "
            "(1 = proportional, large = uniform)."
        )
    if m.weights != "temperature" and m.temperature is not None:
        return (
            f"data.mixture.temperature={m.temperature:g} has no effect with data.mixture.weights={m.weights}; "
            f"remove it or set data.mixture.weights=temperature."
        )
    return None


def _shares(c: Config) -> str | None:
    m = c.data.mixture
    if m.weights != "explicit":
        if not m.shares:
            return None
        return (
            f"data.mixture.shares has no effect with data.mixture.weights={m.weights}; remove it or set "
            f"data.mixture.weights=explicit."
        )
    for env, share in m.shares.items():
        if share < 0:
            return f"data.mixture.shares: {env} has {share:g}; a weight must be 0 (left out) or above."
    if not sum(m.shares.values()):
        return (
            "data.mixture.weights=explicit needs an environment with a weight above 0; add "
            "data.mixture.shares={environment: weight, …}."
        )
    return None


def _curriculum(c: Config) -> str | None:
    curriculum = c.data.mixture.curriculum
    for switch, off, keys in (
        ("signal_weights", "false", ("floor", "half_life", "prior")),
        ("defer_after", "0", ("defer_passes",)),
    ):
        for key in keys:
            value = getattr(curriculum, key)
            if not getattr(curriculum, switch) and value != type(curriculum).model_fields[key].default:
                return (
                    f"data.mixture.curriculum.{key}={value:g} has no effect with data.mixture.curriculum.{switch}="
                    f"{off}; remove it or switch that on."
                )
    return None


RULES: tuple[Rule, ...] = (
    _temperature,
    _shares,
    _curriculum,
)

"""Of the split."""

from __future__ import annotations

from megatron_fleet.config.rules.rule import Rule
from megatron_fleet.config.schema import Config


def _bounds_of_evaluation(c: Config) -> str | None:
    least, most = c.data.min_eval_per_env, c.data.max_eval_per_env
    if most is None or least <= most:
        return None
    return (
        f"data.min_eval_per_env={least} is above data.max_eval_per_env={most}, so no environment would be evaluated; "
        f"lower it to {most} or less."
    )


RULES: tuple[Rule, ...] = (_bounds_of_evaluation,)

"""Stand-in for the FP8 recipes: base classes only."""


class DelayedScaling:
    """Base of Megatron's recipe class."""

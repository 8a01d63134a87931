"""An advantage estimator of your own: `mfleet train algorithm.advantage=my_advantage:ranks` (see README.md)."""

from __future__ import annotations

import numpy as np


def ranks(rewards: np.ndarray) -> np.ndarray:
    """The rank of each reward in its group, equal rewards sharing theirs, scaled to −1…1 and centred.

    Args:
        rewards: the known rewards of one group, float64 ``[K]`` with K ≥ 2.

    Returns:
        Advantages, ``[K]``.
    """
    below = (rewards[:, None] > rewards).sum(axis=1)
    above = (rewards[:, None] < rewards).sum(axis=1)
    return (below - above) / (len(rewards) - 1)

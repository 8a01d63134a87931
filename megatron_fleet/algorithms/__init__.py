"""Path from groups of trajectories to a loss: pure functions, selected by name.

``advantages.py`` compares the trajectories of one task, ``batch.py`` filters groups and multiplies advantages by the
global normaliser into scaled advantages, and ``losses.py`` turns these and log-probs into a plain sum: a term of
``policy_terms.py``, weighted by one of ``corrections.py``, plus KL (``kl.py``) and entropy. The gradient therefore does
not depend on micro-batches, packing or layout. An unknown reward enters no statistic and no loss.
"""

"""From groups of trajectories to a loss: pure functions, by name.

``advantages.py`` compares the trajectories of one task, ``batch.py`` filters groups and multiplies advantages with the
global normaliser into scaled advantages, ``losses.py`` turns log-probs and these into a plain sum: a term of
``policy_terms.py``, weighted by one of ``corrections.py``, plus KL (``kl.py``) and entropy. So the gradient does not
depend on micro-batches, packing or layout. An unknown reward enters no statistic and no loss.
"""

"""Tuning by measurement on the target machine: `mfleet tune …`.

`precision.py` runs every supported precision on a few layers of the model (`truncate.py`), each in a process of its own
(`trial.py`), and reports the fastest and its effect on log-probs.
"""

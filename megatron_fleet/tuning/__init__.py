"""Choices measured on the machine at hand: `mfleet tune …`.

`precision.py` tries every precision that can run here on a few layers of the model (`truncate.py`), each in a process
of its own (`trial.py`), and says which is fastest and how far it moves log-probs.
"""

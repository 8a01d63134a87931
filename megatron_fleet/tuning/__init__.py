"""Tuning by measurement on the target machine: `mfleet tune …`.

`tune_precision.py` and `tune_trainer.py` run candidates on the first layers of the model (`truncate.py`, `trial.py`),
`tune_engine.py` on the run's own engine (`engine_trial.py`). Each candidate has a process of its own, and `search.py`
chooses. A choice is written into a file that every command takes (`override_file.py`).
"""

"""Optimizer steps that looked wrong: kept on disk, run again alone, compared.

``dumps.py`` writes and opens what is kept, ``replay.py`` runs the forward and backward pass again in one process or
under torchrun, ``report.py`` says what agrees. Neither Ray nor vLLM nor an environment is needed.
"""

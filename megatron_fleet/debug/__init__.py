"""Optimizer steps that looked wrong: kept on disk, run again alone, compared.

``dumps.py`` writes and opens dumps, ``replay.py`` runs the forward and backward pass of one again in a trainer of its
own, ``report.py`` says what agrees. Neither Ray nor vLLM nor an environment is needed.
"""

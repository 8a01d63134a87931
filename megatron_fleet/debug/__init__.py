"""Dumps of suspicious optimizer steps: saved, replayed in isolation and compared.

``dumps.py`` writes and opens dumps, ``replay.py`` repeats the forward and backward pass of one in a trainer of its own,
and ``report.py`` compares the results. Neither Ray nor vLLM nor an environment is needed.
"""

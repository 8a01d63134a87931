"""Evaluations: which tasks, what is written down of them, and `mfleet eval`, which plays them without training.

``plan.py`` chooses tasks, ``dumps.py`` writes Fleet's files, ``uploads.py`` copies files to a store in the background.
"""

"""Evaluations, during training and by `mfleet eval`: task choice, recorded episodes, result files.

``plan.py`` chooses tasks, ``dumps.py`` writes Fleet's files, ``uploads.py`` copies files to a store in the background.
"""

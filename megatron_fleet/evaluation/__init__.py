"""Evaluations, during training and by `mfleet eval`: task choice, recorded episodes, result files.

``evaluator.py`` chooses and plays tasks, ``dumps.py`` writes Fleet's files, ``uploads.py`` copies files to a store in
the background.
"""

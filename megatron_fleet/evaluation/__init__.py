"""Evaluations, during training and by `mfleet eval`: task choice, recorded episodes, result files.

``evaluator.py`` chooses and plays tasks. ``in_training.py`` says when a run evaluates: in the foreground, behind an
update, or by engines of their own (``apart.py``). ``eval_command.py`` is `mfleet eval`, whose finished episodes are in
``store.py``. ``episode_records.py`` writes the files of episodes, those of training steps too: ``dumps.py`` in Fleet's
format, ``uploads.py`` copies to a store.
"""

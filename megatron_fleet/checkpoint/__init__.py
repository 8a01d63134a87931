"""Checkpoints needed to resume a run: folders that exist whole or not at all.

A checkpoint is written next to its final path; its manifest comes last, then the rename. Readers trust only a
checkpoint whose sizes and checksums match its manifest, and fall back to the newest such one; when all are damaged, the
run fails instead of starting over.

``checkpoints.py`` and ``manifest.py`` are one folder and all of a run, ``store.py`` their copies elsewhere.
``resume_point.py`` finds where a run starts from, ``saves.py`` says when one is saved and sees to it, ``exports.py``
makes HF folders of them meanwhile. What the trainer's hosts copy themselves is in ``trainer/state_files.py``.
"""

"""Checkpoints needed to resume a run: folders that exist whole or not at all.

A checkpoint is written next to its final path; its manifest comes last, then the rename. Readers trust only a
checkpoint whose sizes and checksums match its manifest, and fall back to the newest such one; when all are damaged, the
run fails instead of starting over.
"""

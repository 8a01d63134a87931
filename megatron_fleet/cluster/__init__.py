"""Processes of a run on its hosts: placement, launching, rank identity and messages between hosts."""

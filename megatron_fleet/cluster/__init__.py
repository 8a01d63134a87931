"""Processes on machines: who is started where, how a rank learns which one it is, and messages between hosts."""

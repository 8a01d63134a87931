"""What a run needs to go on: folders that exist whole or not at all.

A checkpoint is written beside its final name; its manifest comes last, then the rename. Readers trust nothing without
a manifest whose sizes and checksums agree, and fall back to the newest one that does; where none does, no run starts
over.
"""

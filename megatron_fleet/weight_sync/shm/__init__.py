"""``shm``: engines on the trainer's host map memory that the ranks write and the controller holds.

The memory has the whole model, not a few buckets at a time: an engine that starts again between two versions takes the
last one from it. Writing and loading overlap: engines load the buckets that are ready. Nothing is copied on the way,
whatever the engine's tensor parallelism.
"""

"""``shm`` transport: engines on the trainer's host map memory that the ranks write and the controller owns.

The memory holds the whole model, not a few buckets at a time, so an engine that restarts between two updates loads the
last version from it. Writing and loading overlap: engines load each bucket once it is ready. Nothing is copied in
between, regardless of the engine's tensor parallelism.
"""

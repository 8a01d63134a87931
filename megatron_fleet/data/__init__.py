"""Tasks: where they come from, which are played, the split, and the order in which they are played.

Fleet's task files in every spelling become ``Task`` rows or sentences with row, field and expectation. A task's side of
the split depends on its key, on limits per environment, and on the manifest of an earlier split, which it obeys. The
sampler's state is a few numbers, so a resumed run meets the same tasks. ``dataset.py`` puts it together.
"""

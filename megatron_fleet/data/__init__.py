"""Tasks: sources, selection, split and sampling order.

Fleet's task files in every spelling become ``Task`` rows, or error messages with row, field and expectation. A task's
side of the split depends on its key, on limits per environment, and on the manifest of an earlier split, which takes
precedence. The sampler's state is a few numbers, so a resumed run gets the same tasks. ``dataset.py`` combines these.
"""

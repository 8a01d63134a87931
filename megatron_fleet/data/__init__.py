"""Tasks: the file, its rows, the split, and the order in which they are played.

Fleet's task files in every spelling become ``Task`` rows or one sentence with file, row, field and expectation. The
split depends on a task's key alone; the sampler's state is a few numbers, so a resumed run meets the same tasks.
"""

"""Checks before anything is started, for `mfleet train`, `eval` and `launch`.

``checks.py`` compares the configuration with files, model, tasks and servers; ``own_parts.py`` lists the parts that a
user may supply, and loads them where they will be called.
"""

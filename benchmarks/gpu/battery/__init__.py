"""The GPU battery: parts that measure this project on a GPU, each in a process of its own. Start with ``../run.py``."""

"""HF folder ↔ Megatron ``torch_dist`` checkpoint: planned from headers only, then streamed in little memory.

``to_megatron.py`` and ``to_hf.py`` plan the content of every output file (``plan.py``), byte for byte; ``content.py``
produces any of these bytes on demand; ``execute.py`` requests them, window by window, from several threads, and makes
the result appear completely or not at all. ``inspect.py`` lists and ``verify.py`` compares existing folders.
"""

"""HF folder ↔ Megatron ``torch_dist`` checkpoint: planned from headers alone, then streamed through little memory.

``to_megatron.py`` and ``to_hf.py`` plan what every output file consists of (``plan.py``), byte for byte; ``content.py``
knows how to make any of those bytes when asked; ``execute.py`` asks, window by window, from several threads, and makes
the result appear whole or not at all. ``inspect.py`` and ``verify.py`` look at and compare what is there.
"""

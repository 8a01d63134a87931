"""Quantised weights in Hugging Face formats, converted to and from BF16 bit for bit.

``fp8.py`` (E4M3 in 128×128 blocks) and ``int4.py`` (compressed-tensors, groups of 32) work on numpy arrays on one CPU
core without holding the GIL and need no torch; ``torch_ops.py`` does the same on tensors of any device.

BF16 is a uint16 array of its bits. An unchanged weight gets back the codes and scales it came from, whichever rule
made them: ``choose_scales`` prefers a scale under which quantising changes nothing.
"""

"""Differences between CPU and CUDA hosts, in one place.

``device.py`` selects devices and collective backends. ``megatron/`` gives Megatron-Core its layers on hosts without
Transformer Engine, and answers its ``torch.cuda`` calls, for ``megatron.core`` alone.
"""

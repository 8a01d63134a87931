"""What differs between CPU and CUDA hosts, in one place.

``device.py`` says where tensors live and how ranks talk. ``megatron/`` gives Megatron-Core its layers on hosts without
Transformer Engine, and answers the ``torch.cuda`` calls it makes, for ``megatron.core`` alone.
"""

"""Byte-level access to Megatron's ``torch_dist`` checkpoints: no torch, Megatron, process group or tensors in memory.

``index.py`` locates every chunk of every tensor, ``folder.py`` finds the checkpoint in a run folder, ``container.py``
handles the ``torch.save`` archive around each chunk, and ``writer.py`` writes the files around the data.
"""

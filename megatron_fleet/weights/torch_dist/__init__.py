"""Megatron's ``torch_dist`` checkpoints by their bytes: no torch, no Megatron, no process group, no tensor in memory.

``index.py`` says where every chunk of every tensor lies, ``folder.py`` finds the checkpoint in a run folder,
``container.py`` knows the ``torch.save`` archive around each chunk, and ``writer.py`` makes the files around the data.
"""

"""Weights in Hugging Face folders, in Megatron checkpoints and on the ranks, connected by the weight tables.

``mapping.py`` compiles a family's table (``models/``) for one model: the rows of HF tensors that make up a Megatron
tensor. ``hf_folder.py``, ``hf_model.py`` and ``hf_rows.py`` read HF folders, ``torch_dist/`` and
``checkpoint_reader.py`` Megatron checkpoints; ``quant/`` decodes and encodes FP8 and INT4. The table drives direct
loading of a rank's rows (``shards.py``), conversion in both directions (``convert/``), export to a folder
(``export.py``) and live export to the engines (``source.py``, ``exchange.py``): each rank encodes and sends the rows
it owns, and an engine has a complete version or none. ``fetch/`` gets models from the hub and from object stores.
"""

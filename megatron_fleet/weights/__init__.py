"""The weight tables at work: Hugging Face folders, Megatron's checkpoints and what ranks hold.

``mapping.py`` compiles a family's table (``models/``) for one model: which rows of which HF tensor make up a Megatron
tensor. ``hf_folder.py``, ``hf_model.py`` and ``hf_reader.py`` read HF folders, ``torch_dist/`` and
``checkpoint_reader.py`` Megatron's checkpoints; ``quant/`` decodes and encodes FP8 and INT4. From the table come direct
loading (``load.py``; which rows a rank holds: ``shards.py``), conversion both ways (``convert/``), the export to a
folder (``export.py``) and the live export to the engines (``source.py``): each rank writes the rows it owns, and an
engine has all of a version or none.
"""

"""One table per architecture: which rows of which Hugging Face tensor make up a Megatron tensor.

``architectures/`` holds the families as data, ``model.py`` says what a model computes, ``mapping.py`` compiles its
table. ``hf_config.py`` and ``megatron_config.py`` translate configurations; ``hf_folder.py``, ``hf_model.py`` and
``hf_reader.py`` read HF folders, ``torch_dist/`` and ``checkpoint_reader.py`` Megatron's checkpoints; ``quant/``
decodes and encodes FP8 and INT4. From the table come direct loading (``load.py``; which rows a rank holds:
``shards.py``), conversion both ways (``convert/``), the export to a folder (``export.py``) and the live export to the
engines (``source.py``, ``publish.py``): each rank writes the rows it owns, and an engine has all of a version or none.
"""

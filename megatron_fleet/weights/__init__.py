"""One table per architecture: which rows of which Hugging Face tensor make up a Megatron parameter.

``rules.py`` is the vocabulary of a table, ``architectures/`` holds the tables, ``mapping.py`` compiles one for a model
and a layout. From it come direct loading (``load.py``), the export to a folder (``export.py``) and the live export to
the engines (``publish.py``): each rank writes the rows it owns, and an engine has all of a version or none of it.
"""

"""The configuration: one typed tree, every mistake explained before anything starts.

Hydra composes the YAML groups of ``configs/``, the pydantic tree in ``schema.py`` accepts or refuses, ``validate.py``
checks what spans several keys, ``keys.py`` knows all names and suggests the right one for a misspelt one.
"""

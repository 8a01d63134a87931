"""Typed configuration tree, validated before a run starts.

Hydra composes the YAML groups of ``configs/``, the pydantic tree in ``schema.py`` validates the result, ``validate.py``
applies the rules between keys that stand beside each section, and ``keys.py`` lists all keys and suggests the closest
one for a misspelt key.
"""

"""How the model families write a tool call: one ``Syntax`` a module, for ``agents/parser.py``."""

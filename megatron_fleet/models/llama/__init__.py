"""Llama 3, 3.1, 3.2 (text) and 3.3."""

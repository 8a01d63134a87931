"""Validation rules across several keys, one module per subject. A rule returns an error message, or ``None``."""

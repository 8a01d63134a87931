"""Checks that span several keys, one module a subject. A rule returns the sentence that refuses, or ``None``."""

"""Kimi K2, K2 Thinking and K2.5."""

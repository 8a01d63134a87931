"""Stands in for fleet-ai/OpenEnv where it is not installed."""

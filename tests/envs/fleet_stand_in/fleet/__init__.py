"""Stands in for fleet-python where it is not installed."""

"""Telemetry of a run: metrics with one definition each, terminal output, files, learning curve, summary.

``registry.py`` lists every metric name with its formula; ``metrics.py`` computes, ``sinks.py`` stores. Every file
supports resuming: what a failed attempt wrote past its checkpoint is removed.
"""

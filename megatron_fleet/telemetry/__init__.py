"""What a run tells: metrics with one definition each, the terminal, files, the curve, the summary.

``registry.py`` lists every name with its formula; ``metrics.py`` computes, ``sinks.py`` keeps. Every file resumes: what
a lost attempt wrote past its checkpoint is taken back.
"""

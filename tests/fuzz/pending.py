"""Findings that are known and wait for their mend: surface, and file below the package where they come from.

The tests leave them out; the command tells them. An entry goes with its mend, and its inputs go to the corpus.
"""

PENDING: frozenset[str] = frozenset()

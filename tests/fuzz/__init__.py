"""Random inputs for everything that a user or a stranger hands to the program.

A *surface* (``surfaces/``) is one kind of input: it gives a few valid ones, and a check that hands one to the program.
`mutation` makes invalid ones of them, `engine` runs the check. Whatever the input is, the program answers with a value
or with one sentence (`outcomes`); any other exception, a hang or a file left half-written is a finding. The smallest
form of a finding is kept in ``corpus/`` and checked by every test run.

The tests try a fixed number of inputs. More, without end, until Ctrl-C, from ``tests/``::

    ../.venv/engine/bin/python -m fuzz                            all surfaces by turns
    ../.venv/engine/bin/python -m fuzz --surface hf_config --inputs 100000 --seed 7
    ../.venv/engine/bin/python -m fuzz --surface hf_config --seed 7 --only 1234      one input again, shown
"""

import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
# What other tests make small inputs with.
for _folder in ("analysis", "weights"):
    if str(TESTS / _folder) not in sys.path:
        sys.path.append(str(TESTS / _folder))

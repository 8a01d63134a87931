"""Playing many episodes at once: Ray actors for the parts, sockets for the tokens.

``service.py`` is the driver's handle. The manager owns engines and workers as components that are watched and
replaced (``components.py``), and keeps book of which episodes are still to be played (``collection.py``). Workers play
hundreds of episodes concurrently and speak to an engine over one socket (``wire.py``); Ray carries only batches. Every
episode started ends exactly once (``accounting.py``), and everything a run started ends with it (``janitor.py``).
"""

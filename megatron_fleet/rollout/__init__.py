"""Playing many episodes at once: Ray actors for the parts, sockets for the tokens.

``service.py`` is the controller's handle. ``pool.py`` owns engines, workers and the environment server as components
that are watched and replaced (``components.py``, ``engine_slot.py``); ``collector.py`` shares the workers' places among
the collections under way, each of which keeps book of the episodes still to be played (``collection.py``). Workers play
hundreds of episodes concurrently and speak to an engine over one socket (``wire.py``); Ray carries only batches. Every
episode started ends exactly once (``accounting.py``), and everything a run started ends with it (`cluster.janitor`).
"""

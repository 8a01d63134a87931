"""Rollout: concurrent episodes, with Ray actors as components and sockets for the tokens.

``service.py`` is the controller's handle. ``pool.py`` owns engines, workers and the environment server as components
that are watched and replaced (``components.py``, ``engine_slot.py``). ``collector.py`` shares the workers' slots among
the running collections; each collection tracks its episodes still to be played (``collection.py``). Workers play
hundreds of episodes concurrently and talk to each engine over one socket (``wire.py``); Ray carries only batches. Every
started episode ends exactly once (``accounting.py``), and everything a run started ends with it (`cluster.janitor`).
"""

"""Rollout: concurrent episodes, with Ray actors as components and sockets for the tokens.

``service.py`` is the controller's handle. ``pool.py`` owns engines, workers and the environment server as components
that are watched and replaced (``components.py``, ``engine_slot.py``). ``collector.py`` shares the workers' slots among
the running collections; each collection tracks its episodes still to be played (``collection.py``). Workers play
hundreds of episodes concurrently with the engines, each over one socket (``engine_server.py``), or with an endpoint
(``policy.py``); Ray transports only batches. Every started episode ends exactly once (``requests.Accounting``), and
everything a run started ends with it (`cluster.janitor`).
"""

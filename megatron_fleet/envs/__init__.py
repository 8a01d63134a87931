"""Environments: four async verbs; behind them any OpenEnv server, Fleet's hosted ones, and one that ships with this.

``base.py`` is all that an agent may know; ``registry.py`` lists the kinds. ``openenv.py`` keeps one WebSocket session
per episode: each request has a deadline, and a session that missed one is lost, because nobody knows what the server
did. ``fleet.py`` stands between FleetTaskEnv's habits and the protocol. ``embedded/`` holds three small worlds over
SQLite with generated, proven tasks; verifier code runs in confined processes of its own.
"""

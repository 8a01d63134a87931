"""Environments: four async verbs, behind them any OpenEnv server, and one that ships with the project.

``base.py`` is all that an agent may know. ``openenv.py`` keeps one WebSocket session per episode: each request has a
deadline, and a session that missed one is lost, because nobody knows what the server did. ``embedded/`` holds three
small worlds over SQLite with generated, proven tasks; verifier code runs in confined processes of its own.
"""

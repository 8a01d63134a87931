"""Environments behind four async methods: any OpenEnv server, Fleet's hosted environments, and an embedded fleet.

``base.py`` is the only interface that agents depend on; ``registry.py`` lists the kinds. ``openenv.py`` keeps one
WebSocket session per episode: each request has a deadline, and a session that missed one is lost, because the server's
state is then unknown. ``fleet.py`` adapts FleetTaskEnv to the protocol. ``embedded/`` holds three small worlds over
SQLite with generated tasks that are proven solvable; verifier code runs in sandboxed processes of its own.
"""

"""The embedded fleet: three small tool-use environments, their tasks and their OpenEnv server.

``tickets``, ``booking`` and ``ledger`` follow the shape of Fleet's environments (tools over a database, a verifier that
compares the database with its seed) and are small enough for a model of a few million parameters to learn on a CPU.
"""

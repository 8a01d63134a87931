"""Models that are not on this host yet (`config.remote_model`).

``cache.py`` makes them present: looked up, downloaded once per host, compared with what their source states. ``hub.py``
and ``object_store.py`` are the sources, ``listing.py`` is what either says of a model.
"""

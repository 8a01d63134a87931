"""Memory of a run, computed from its configuration and the model's ``config.json`` alone. No torch.

``parameters`` counts what a rank holds, ``activations`` what a pass keeps, ``engine_memory`` what vLLM takes, and
``phases`` adds them up for each device, host and phase of a run.
"""

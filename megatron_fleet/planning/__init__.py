"""Plan of a run before a GPU is rented: memory, time of a step by phase, cost; layouts to choose from; a simulation.

``shapes`` knows models without their weights, ``hardware`` knows GPUs, ``workload`` says how long episodes are;
``training`` and ``rollout`` compute seconds, ``plan`` puts them together with `planning.memory`, ``search`` compares
layouts, ``simulation`` plays many steps. Nothing here imports torch.
"""

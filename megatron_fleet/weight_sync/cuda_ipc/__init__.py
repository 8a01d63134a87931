"""``cuda_ipc``: engines on the trainer's GPUs copy from a buffer of the ranks, through vLLM's own packed CUDA IPC.

The buffer is filled again and again during an update, so nothing of it can be read later: an engine that starts again
gets the version from the trainer once more.
"""

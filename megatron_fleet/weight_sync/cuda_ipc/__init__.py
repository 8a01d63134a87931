"""``cuda_ipc`` transport: engines on the trainer's GPUs copy from the ranks' buffer, using vLLM's packed CUDA IPC.

The buffer is reused throughout an update, so its content cannot be read later: a restarted engine gets the version
from the trainer again.
"""

"""Megatron-Core on the host at hand. Importing this package makes ``megatron.core`` importable and usable there."""

import os
import warnings

from megatron_fleet.platform.megatron.adapt import install

# Nobody here can act on them: Megatron names optional packages that are missing, PyTorch what Megatron should rename.
_NOISY = r"megatron\.core|torch\.distributed|megatron_fleet\.platform\.megatron\.adapt"
warnings.filterwarnings("ignore", category=UserWarning, module=_NOISY)
warnings.filterwarnings("ignore", category=FutureWarning, module=_NOISY)

# Read when Transformer Engine is imported. Its own scales of FP8 blocks are powers of two; checkpoints and engines with
# such blocks have any float32.
os.environ.setdefault("NVTE_FP8_BLOCK_SCALING_FP32_SCALES", "1")

install()
